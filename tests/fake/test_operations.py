"""Launches of a step on one GPU: few in the optimizer phase, however many blocks the model has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import dtrain
from dtrain.models import build_model
from tests.fake.harness import CONFIG, VOCAB, fake_engine
from tests.fake.launches import HAS_TRITON
from tests.measure.fake_operations import Counts, count_phases

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")

LIMIT = 5
"""Kernels of the optimizer phase, from the last gradient to the new weights: target G4."""


def counts(precision: str, num_layers: int, stage: int, ema_decay: float | None = None) -> dict[str, Counts]:
    config = replace(CONFIG, num_layers=num_layers)
    with fake_engine(precision=precision, config=config, zero_stage=stage, ema_decay=ema_decay) as rank:
        return count_phases(rank)


def test_the_optimizer_phase_is_a_few_launches_whatever_the_number_of_groups() -> None:
    few, many = (counts("bf16", num_layers, 2, ema_decay=0.999)["step"] for num_layers in (1, 2))
    assert few.kernels == many.kernels
    assert few.copies == many.copies
    assert many.kernels.total() <= LIMIT, many.kernels
    few, many = (counts("fp8", num_layers, 2)["step"] for num_layers in (1, 2))
    assert few.kernels == many.kernels, "FP8 weights add launches, but not one for each"


def test_a_received_gradient_is_summed_in_one_launch() -> None:
    with fake_engine(8, zero_stage=2) as rank:
        step = count_phases(rank)["step"].kernels
    assert step["_add_rows"] > 1
    assert step["stack"] == 0, "the weights are a row already"


def test_no_kernel_is_compiled_after_the_first_step() -> None:
    """Triton compiles again for other dtypes and alignments, and for the numbers 1 and multiples of 16."""
    options: dict[str, Any] = {"master": "remainder", "grad_dtype": "bf16", "max_grad_norm": 1.0}
    with fake_engine(8, schedule=dtrain.Cosine(2, 40), **options) as rank:
        built = {launch.variant for launch in rank.launches if launch.kernel == "adamw"}
        rank.step(2)
        compiled = {launch.variant for launch in rank.launches}
        assert {variant for variant in compiled if variant[0] == "adamw"} == built, "the update is compiled at start"
        for num_micro_batches in (1, 3):
            rank.step(num_micro_batches)
        assert {launch.variant for launch in rank.launches} == compiled


def with_unused() -> nn.Module:
    model = build_model(CONFIG, VOCAB, seed=0)
    model.unused = nn.Linear(96, 32)
    return model


@pytest.mark.parametrize("optimizer", [dtrain.AdamW(compile=True), dtrain.AdamW(compile=False), dtrain.Muon()])
def test_a_parameter_without_a_gradient_is_updated_apart_without_a_wait(optimizer: Any) -> None:
    with fake_engine(8, model=with_unused, optimizer=optimizer, ema_decay=0.999, zero_stage=2) as rank:
        rank.step(1)
        compiled = {launch.variant for launch in rank.launches}
        apart = {*rank.engine._optimizer._apart}
        assert apart == {"unused.weight", "unused.bias"}
        for _ in range(2):
            rank.step(1)
        rank.collectives.require_waited()
        assert {*rank.engine._optimizer._apart} == apart
        assert {launch.variant for launch in rank.launches} == compiled
