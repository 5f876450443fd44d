"""Every odd model of the zoo trains as the oracle does: tied, frozen, unused, reused, recurrent, with buffers, ..."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dtrain
from tests.helpers.oracle import assert_close_to_largest, normwise_error
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Result, Run, oracle_run, start, train
from tests.helpers.zoo import ZOO, make

pytestmark = pytest.mark.processes

WORLD = 2


def odd_run(name: str, precision: str, stage: int) -> Run:
    return Run(
        name, steps=6, accumulation=2, unequal_weights=True, options={"precision": precision, "zero_stage": stage}
    )


def train_odd(rank: int, world: int, name: str) -> dict[tuple[str, int], Result]:
    return {(p, s): train(rank, world, odd_run(name, p, s)) for p in ("fp32", "bf16") for s in range(4)}


def without_noise(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Leaves out gradients that are zero but for rounding, such as of a bias before a batch norm."""
    largest = max(float(g.abs().max()) for g in want.values() if g.numel())
    real = [name for name, g in want.items() if not g.numel() or not 0 < float(g.abs().max()) < 1e-6 * largest]
    return {name: got[name] for name in real}, {name: want[name] for name in real}


@pytest.mark.parametrize("name", sorted(ZOO))
def test_trains_like_the_oracle(name: str) -> None:
    results = run_ranks(WORLD, train_odd, name)[0]
    oracle, steps = oracle_run(odd_run(name, "fp32", 0), WORLD)
    trained = {n for n, p in make(name).build(0).named_parameters() if p.requires_grad}
    # Adam turns even rounding noise into steps of the learning rate: such a parameter's path is arbitrary
    real, _ = without_noise(steps[0].gradients, steps[0].gradients)
    masters = {n: t for n, t in oracle.masters().items() if n in trained and n in real}
    for (precision, stage), got in results.items():
        assert all(outcome.applied for outcome in got.outcomes), f"{name} {precision} stage {stage}"
        if precision == "fp32":
            assert_close_to_largest(*without_noise(got.gradients, steps[0].gradients), 2e-6)
        else:
            error = normwise_error(got.gradients, steps[0].gradients)
            assert error < 0.05, f"{name} stage {stage}: gradients off by {error:.3g}"
        assert got.masters.keys() == trained
        error = normwise_error({n: got.masters[n] for n in masters}, masters)
        assert error < (1e-4 if precision == "fp32" else 2e-2), f"{name} {precision} stage {stage}: off by {error:.3g}"


def ties_and_buffers(rank: int, world: int) -> dict[str, Any]:
    tied = start(Run("tied", options={"precision": "bf16"}))
    names = [name for name, _ in tied.module.named_parameters(remove_duplicate=False)]
    unique = [name for name, _ in tied.module.named_parameters()]
    frozen = start(Run("partly_frozen", options={"precision": "bf16"}))
    buffers = start(Run("buffers", options={"precision": "bf16"}))
    return {
        "aliases": len(names) - len(unique),
        "frozen": [p.dtype for p in frozen.module.parameters() if not p.requires_grad],
        "buffers": {n: b.dtype for n, b in buffers.module.named_buffers()},
        "expected": {n: b.dtype for n, b in make("buffers").build(0).named_buffers()},
    }


def test_ties_frozen_parameters_and_buffers_survive() -> None:
    for found in run_ranks(2, ties_and_buffers):
        assert found["aliases"] == 1, "the tied head must still be the embedding's Parameter"
        assert torch.bfloat16 in found["frozen"]
        assert found["buffers"] == found["expected"], "buffers keep their own dtype"


def broadcast_from_rank_0(rank: int, world: int) -> dict[str, torch.Tensor]:
    model = make("conv_batch_norm").build(rank)  # another seed on each rank
    for buffer in model.buffers():
        buffer.add_(rank)
    engine = dtrain.initialize(model, precision="fp32", seed=0)
    buffers = {name: b.clone() for name, b in engine.module.named_buffers()}
    return {**buffers, **{name: p.detach().clone() for name, p in engine.module.named_parameters()}}


def test_rank_0_gives_weights_and_buffers() -> None:
    first, second = run_ranks(2, broadcast_from_rank_0)
    expected = make("conv_batch_norm").build(0)
    for name, tensor in [*expected.named_parameters(), *expected.named_buffers()]:
        assert torch.equal(first[name], tensor), name
        assert torch.equal(second[name], tensor), name
