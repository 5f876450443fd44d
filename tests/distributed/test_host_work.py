"""What the engine does on the host for each block of a model, beside the model's own forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import dtrain
from dtrain.config.model import ModelConfig
from dtrain.distributed.transport.connections import Connections
from dtrain.models import build_model
from tests.helpers.op_dtypes import operations_of
from tests.helpers.ranks import run_ranks

CONFIG = ModelConfig(num_layers=1, hidden_dim=32, num_heads=1, max_seq_len=4)
VOCAB = 64
WARMUP = 6  # steps; by then each slot of the ring has been used


def engine_step(num_layers: int, stage: int) -> Callable[[], None]:
    tokens = torch.zeros(1, CONFIG.max_seq_len, dtype=torch.int64)
    engine = dtrain.initialize(
        build_model(replace(CONFIG, num_layers=num_layers), VOCAB, seed=0),
        optimizer=dtrain.AdamW(compile=False),
        engine=dtrain.Native(zero_stage=stage),
        precision="fp32",
        seed=0,
    )

    def step() -> None:
        engine.backward(engine(tokens, tokens).loss)
        engine.step()

    for _ in range(WARMUP):
        step()
    return step


def added_per_block(rank: int, world: int, stage: int) -> float:
    """Returns the operations of torch in a step that a block adds, without those of a plain loop."""
    tokens = torch.zeros(1, CONFIG.max_seq_len, dtype=torch.int64)
    added = []
    for num_layers in (2, 4):
        model = build_model(replace(CONFIG, num_layers=num_layers), VOCAB, seed=0)

        def plain_step(model: nn.Module = model) -> None:
            model(tokens, tokens).loss.backward()
            for parameter in model.parameters():
                parameter.grad = None

        added.append(operations_of(engine_step(num_layers, stage)) - operations_of(plain_step))
    return (added[1] - added[0]) / 2


# six parameters: on one rank a copy of the gradients and their norms; on two ranks also the sum of the gradients, its
# padding, a test of all for Inf and NaN, and the gather of the weights; at stage 3 the gathers of both passes, and a
# detached alias of each tensor that backward needs
@pytest.mark.parametrize(
    ("ranks", "stage", "limit"), [(1, 2, 2), pytest.param(2, 2, 8, marks=pytest.mark.exhaustive), (2, 3, 50)]
)
@pytest.mark.processes
def test_a_block_adds_few_operations(ranks: int, stage: int, limit: int) -> None:
    assert max(run_ranks(ranks, added_per_block, stage)) <= limit


def messages_per_block(rank: int, world: int) -> float:
    """Returns the ready messages in a step of stage 3 that a block adds."""
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        sent: list[object] = []
        send = Connections.send
        patch.setattr(Connections, "send", lambda self, *args: (sent.append(args), send(self, *args))[1])
        for num_layers in (2, 6):
            step = engine_step(num_layers, stage=3)
            sent.clear()
            step()
            counts.append(len(sent))
    return (counts[1] - counts[0]) / 4


@pytest.mark.processes
def test_buffers_are_announced_together() -> None:
    assert max(run_ranks(2, messages_per_block)) < 0.5
