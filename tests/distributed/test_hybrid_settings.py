"""Hybrid sharding with what changes the held states: other optimizers, formats, frozen weights, averages."""

from __future__ import annotations

import pytest
import torch

import dtrain
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, train_all

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
        Run(model, steps=3, accumulation=2, options={**defaults, **options}) for model, options in SETTINGS.values()
    ]
    hybrid = [run.with_options(shard_size=2) for run in plain]
    results = run_ranks(4, train_all, [*plain, *hybrid])[0]
    for case, expected, got in zip(SETTINGS, results[: len(plain)], results[len(plain) :], strict=True):
        assert got.outcomes == expected.outcomes, case
        assert all(outcome.applied for outcome in got.outcomes), case
        for name, master in expected.masters.items():
            assert torch.equal(got.masters[name], master), f"{case}: {name}"
