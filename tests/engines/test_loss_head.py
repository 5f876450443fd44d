"""``model.loss_chunk`` under every engine and stage: the losses are those of full logits, and so are the weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import dtrain
from dtrain.config.capabilities import CAPABILITIES
from dtrain.config.model import ModelConfig
from dtrain.errors import ConfigError
from dtrain.models import build_model
from tests.engines.helpers import STAGES
from tests.helpers.oracle import normwise_error
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

VOCAB, STEPS = 70, 2
CONFIG = ModelConfig(num_layers=2, hidden_dim=32, num_heads=4, max_seq_len=16)


def train(rank: int, chunk: int | str, engine: str, stage: int, precision: str, **settings: Any) -> Any:
    """Trains with and without a tied head; returns the losses, the weights, and whether training had no logits."""
    config = replace(CONFIG, loss_chunk=chunk, tie_embeddings=stage % 2 == 0)
    made = dtrain.initialize(
        build_model(config, VOCAB, seed=0), engine=engine, zero_stage=stage, precision=precision, seed=0, **settings
    )
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(VOCAB, (2, 2, 17), generator=torch.Generator().manual_seed(2 * step + rank))
        for micro in made.accumulate(list(tokens)):
            output = made(micro[:, :-1], targets=micro[:, 1:])
            made.backward(output)
        losses.append(made.step(lr=1e-3).loss)
    with made.eval():
        assert made(tokens[0]).logits.shape == (2, 17, VOCAB)
    return losses, made.master_state(), output.logits is None


def compare(rank: int, world: int, cases: list[tuple[str, int, str]]) -> list[tuple[Any, Any]]:
    return [(train(rank, 5, *case), train(rank, "none", *case)) for case in cases]


@pytest.mark.parametrize("name", [name for name, engine in CAPABILITIES.items() if not engine.missing_requirement])
def test_losses_and_weights_are_those_of_full_logits(name: str) -> None:
    cases = [(name, stage, "bf16" if name == "deepspeed" else "fp32") for engine, stage in STAGES if engine == name]
    cases += [(name, cases[-1][1], "bf16")]
    for case, (chunked, full) in zip(cases, run_ranks(2, compare, cases)[0], strict=True):
        assert (chunked[2], full[2]) == (True, False), case
        tolerance = 1e-6 if case[2] == "fp32" else 1e-4
        assert chunked[0] == pytest.approx(full[0], rel=tolerance), case
        assert normwise_error(chunked[1], full[1]) < (1e-5 if case[2] == "fp32" else 2e-3), case


def refuse(rank: int, world: int) -> str:
    units = {"sharding_units": ["blocks.*", "head"]}
    with pytest.raises(ConfigError) as caught:
        train(rank, 5, "native", 3, "fp32", **units)
    assert not train(rank, "auto", "native", 3, "fp32", **units)[2], "auto falls back"
    return str(caught.value)


def test_a_head_that_is_a_unit_of_sharding_is_refused() -> None:
    for message in run_ranks(2, refuse):
        assert message == (
            "model.loss_chunk=5: the output layer 'head' belongs to a unit of sharding, in whose forward alone its "
            "weight is whole; use model.loss_chunk=none"
        )
