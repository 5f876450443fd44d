"""Every model of the zoo follows the oracle under each engine: tied, frozen, unused, reused, recurrent, buffers, ..."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtrain
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, assert_odd_models_follow, start, train_all
from tests.helpers.zoo import ZOO, make

pytestmark = pytest.mark.processes

PRECISIONS = ("fp32", "bf16")


def options_of(engine: str, number: int) -> list[dict[str, Any]]:
    """Options for the model ``number``.

    Native's precisions alternate over stages and models, so that each pair of model, stage and precision comes. For
    every model, ``tests.distributed.test_unshard`` compares the bits of stages 2 and 3 in both.
    """
    return {
        "native": [{"precision": PRECISIONS[(number + stage) % 2], "zero_stage": stage} for stage in range(4)],
        "ddp": [{"precision": precision} for precision in PRECISIONS],
        "fsdp2": [{"precision": "fp32", "zero_stage": 2}, {"precision": "bf16", "zero_stage": 3}],
    }[engine]


def odd_run(model: str, engine: str, options: dict[str, Any]) -> Run:
    return Run(
        model,
        steps=6 if engine == "native" else 4,
        accumulation=2,
        unequal_weights=True,
        options={"engine": engine, **options},
    )


@pytest.mark.parametrize("engine", ["native", "ddp", "fsdp2"])
def test_every_model_follows_the_oracle(engine: str) -> None:
    models = enumerate(sorted(ZOO))
    runs = [odd_run(model, engine, options) for number, model in models for options in options_of(engine, number)]
    assert_odd_models_follow(run_ranks(2, train_all, runs, timeout=280), runs)


def test_fsdp2_shards_of_unequal_size_and_none() -> None:
    """Rows that three ranks do not divide, and two rows, of which the third rank has none."""
    fp32, bf16 = options_of("fsdp2", 0)
    runs = [odd_run(model, "fsdp2", fp32) for model in ("conv_group_norm", "odd_sizes", "tied")]
    runs += [odd_run(model, "fsdp2", bf16) for model in ("odd_sizes", "tied")]
    assert_odd_models_follow(run_ranks(3, train_all, runs), runs)


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
