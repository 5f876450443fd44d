"""What the engine does on the host for each block of a model, beside the model's own forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import dtrain
from dtrain.config.model import ModelConfig
from dtrain.models import build_model
from tests.helpers.op_dtypes import operations_of
from tests.helpers.ranks import run_ranks

CONFIG = ModelConfig(num_layers=1, hidden_dim=32, num_heads=1, max_seq_len=4)
VOCAB = 64
WARMUP = 6  # steps; by then each slot of the ring has been used


def added_per_block(rank: int, world: int, stage: int) -> float:
    """Returns the operations of torch in a step that a block adds, without those of a plain loop."""
    tokens = torch.zeros(1, CONFIG.max_seq_len, dtype=torch.int64)
    added = []
    for num_layers in (2, 4):
        config = replace(CONFIG, num_layers=num_layers)
        engine = dtrain.initialize(
            build_model(config, VOCAB, seed=0),
            optimizer=dtrain.AdamW(compile=False),
            engine=dtrain.Native(zero_stage=stage),
            precision="fp32",
            seed=0,
        )
        model = build_model(config, VOCAB, seed=0)

        def plain_step(model: nn.Module = model) -> None:
            model(tokens, tokens).loss.backward()
            for parameter in model.parameters():
                parameter.grad = None

        def engine_step(engine: dtrain.Engine = engine) -> None:
            engine.backward(engine(tokens, tokens).loss)
            engine.step()

        counts = []
        for step in (plain_step, engine_step):
            for _ in range(WARMUP):
                step()
            counts.append(operations_of(step))
        added.append(counts[1] - counts[0])
    return (added[1] - added[0]) / 2


# six parameters: on one rank a copy of each gradient, and four operations of norm and update; on two ranks also a sum
# of each gradient, its exchange, and the gather of the weights; at stage 3 the gathers of both passes, and a detached
# alias of each tensor that backward needs
@pytest.mark.parametrize(
    ("ranks", "stage", "limit"), [(1, 2, 11), pytest.param(2, 2, 28, marks=pytest.mark.exhaustive), (2, 3, 74)]
)
@pytest.mark.processes
def test_a_block_adds_few_operations(ranks: int, stage: int, limit: int) -> None:
    assert max(run_ranks(ranks, added_per_block, stage)) <= limit
