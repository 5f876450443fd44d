"""Hybrid sharding with what changes the held states: other optimizers, formats, frozen weights, averages."""

from __future__ import annotations

import pytest
import torch

import dtrain
from dtrain.distributed.communicator import Communicator
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Result, Run, forward_backward, start, train_all

pytestmark = pytest.mark.processes

SETTINGS = {
    "matrices": ("transformer", {"optimizer": dtrain.Muon(lr=1e-2)}),
    "remainders": ("transformer", {"master": "remainder"}),
    "average": ("transformer", {"ema_decay": 0.9}),
    "wide reduction": ("transformer", {"reduce_dtype": "fp32"}),
    "frozen shards": ("partly_frozen", {"zero_stage": 3}),
    "branches": ("sometimes_used", {}),
    "fp8": ("transformer", {"precision": "fp8"}),
    "fp8 shards": ("transformer", {"precision": "fp8", "zero_stage": 3}),
    "scaled loss": ("mlp", {"precision": "fp16"}),
}


def test_settings_keep_the_bits_of_one_replica() -> None:
    defaults = {"precision": "bf16", "zero_stage": 2, "reproducible": True}
    plain = [
        Run(model, steps=2, accumulation=2, options={**defaults, **options}) for model, options in SETTINGS.values()
    ]
    hybrid = [run.with_options(shard_size=2) for run in plain]
    results = run_ranks(4, train_all, [*plain, *hybrid])[0]
    for case, expected, got in zip(SETTINGS, results[: len(plain)], results[len(plain) :], strict=True):
        assert got.outcomes == expected.outcomes, case
        assert all(outcome.applied for outcome in got.outcomes), case
        for name, master in expected.masters.items():
            assert torch.equal(got.masters[name], master), f"{case}: {name}"


def train_early(rank: int, world: int, runs: list[Run]) -> tuple[list[Result], list[str]]:
    """Sums over the replicas during backward, as on GPUs; returns the labels of the last reductions of a step, too."""
    Communicator.device_is_host = property(lambda _: False)  # type: ignore[assignment,method-assign]
    results = train_all(rank, world, runs)
    engine = start(runs[0])
    forward_backward(engine, runs[0], 0)
    engine.finish_gradients()
    return results, [entry for entry in engine.comm.schedule.log if entry.startswith("all_to_all_single(")]


def test_sums_during_backward_have_the_same_bits() -> None:
    """The ranks wait for the same reductions, whatever their graphs, before they start the sums of the replicas."""
    options = {"precision": "bf16", "shard_size": 2, "sharding_units": ["blocks.*"]}
    runs = [
        Run("transformer", steps=3, accumulation=2, options={**options, "zero_stage": stage, "reproducible": exact})
        for stage, exact in ((1, False), (2, False), (3, False), (2, True))
    ]
    runs.append(Run("sometimes_used", steps=3, accumulation=2, options={"precision": "bf16", "shard_size": 2}))
    at_the_end = run_ranks(4, train_all, runs)[0]
    early, log = run_ranks(4, train_early, runs)[0]
    first_sum = next(number for number, entry in enumerate(log) if "across replicas" in entry)
    assert any("across replicas" not in entry for entry in log[first_sum:]), "the sums start before the last reduction"
    for run, expected, got in zip(runs, at_the_end, early, strict=True):
        assert got.outcomes == expected.outcomes, run
        for name, master in expected.masters.items():
            assert torch.equal(got.masters[name], master), f"{run}: {name}"
