"""Hybrid sharding: replicas of sharded states give the numbers of plain sharding, and send what the formula says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Result, Run, assert_follows_the_oracle, train_all

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")


def run(precision: str = "fp32", *, steps: int = 8, accumulation: int = 3, **options: Any) -> Run:
    options = {"precision": precision, "shard_size": 2} | options
    return Run("transformer", steps=steps, accumulation=accumulation, unequal_weights=True, options=options)


@pytest.mark.parametrize("world", [4, 6])
def test_hybrid_follows_the_oracle(world: int) -> None:
    """Two and three replicas; the padding of three differs."""
    runs = [run(zero_stage=stage, steps=20) for stage in (1, 2, 3)]
    runs += [run("bf16", zero_stage=stage, steps=20, accumulation=1) for stage in (2, 3)]
    assert_follows_the_oracle(
        run_ranks(world, train_all, runs if world == 4 else runs[1:2]), runs if world == 4 else runs[1:2]
    )


def assert_equal_bits(result: Result, other: Result, case: str) -> None:
    assert [(o.loss, o.grad_norm) for o in result.outcomes] == [(o.loss, o.grad_norm) for o in other.outcomes], case
    for name, master in other.masters.items():
        assert torch.equal(result.masters[name], master), f"{case}: {name}"


def test_reproducible_bits_are_those_of_any_other_sharding() -> None:
    """Four ranks as 2 x 2, as one replica, two ranks, one rank; dropout, clipping, weights; a tree with leftovers."""
    options = {"reproducible": True}
    cases = {
        4: [run("bf16", zero_stage=stage, **options) for stage in (1, 2, 3)]
        + [run("bf16", **options, shard_size=None)],
        1: [run("bf16", **options, shard_size=None, accumulation=12)],
    }
    of_ranks = {world: run_ranks(world, train_all, runs)[0] for world, runs in cases.items()}
    (expected,) = of_ranks[1]
    for case, result in zip(cases[4], of_ranks[4], strict=True):
        assert_equal_bits(result, expected, str(case.options))
    plain = run_ranks(4, train_all, [run("bf16")])[0][0]
    differs = [not torch.equal(plain.masters[name], master) for name, master in expected.masters.items()]
    assert any(differs), "the control: sums in another order differ"
