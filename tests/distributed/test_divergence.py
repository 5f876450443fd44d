"""A rank that differs in config, step, data or order of collectives stops the run before any update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import dtrain
from dtrain.engine.vote.record import MUST_AGREE
from dtrain.errors import DivergenceError
from dtrain.precision.loss_scale import LossScaleState
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, forward_backward, start
from tests.helpers.zoo import make

pytestmark = pytest.mark.processes

RUN = Run("transformer", options={"precision": "fp32"})


def masters(engine: Any) -> torch.Tensor:
    return torch.cat([shard.data for shard in engine.local_shards("master")])


def differ(rank: int, world: int, field: str) -> tuple[str, bool]:
    """One good step, then rank 1 differs in ``field``; returns the error and whether the masters stayed."""
    # stages that reduce every micro-batch would hang on another number of them
    engine = start(RUN.with_options(zero_stage=0) if field == "num_micro_batches" else RUN)
    forward_backward(engine, RUN, 0)
    engine.step()
    lr = None
    if rank == 1:
        if field == "step":
            engine.attempted_steps += 1
        elif field == "data_cursor":
            engine.data_cursor = 16
        elif field == "loss_scale":
            engine._finalizer.scale = LossScaleState.of(dtrain.LossScale.of(8.0))
        elif field == "config_hash":
            engine._config_hash += 1
            finalizer = engine._finalizer
            finalizer.config_text = finalizer.config_text.replace('"max_grad_norm": 0.05', '"max_grad_norm": 0.5')
        elif field == "schedule_hash":
            # two equally shaped groups reduced in swapped order: gloo would sum the wrong tensors silently
            groups = engine.sharded.reducer.groups
            groups[0], groups[1] = groups[1], groups[0]
        elif field == "written_weights":
            with torch.no_grad():
                next(engine.module.parameters()).fill_(0.0)
        elif field == "lr":
            lr = 0.5
    run = replace(RUN, accumulation=2) if rank == 1 and field == "num_micro_batches" else RUN
    forward_backward(engine, run, 1)
    before = masters(engine)  # after the write, because an FP32 parameter is its master
    with pytest.raises(DivergenceError) as caught:
        engine.step(lr=lr if lr is not None else 1e-3)
    return str(caught.value), torch.equal(before, masters(engine))


EXPECTED = {
    "step": "step is 1 on rank 0 and 2 on rank 1",
    "data_cursor": "data_cursor is 0 on rank 0 and 16 on rank 1",
    "loss_scale": "loss_scale is 1.0 on rank 0 and 8.0 on rank 1",
    "config_hash": "'max_grad_norm' is 0.05 on rank 0 and 0.5 on rank 1",
    "schedule_hash": "Order of collectives: number ",
    "num_micro_batches": "num_micro_batches is 1 on rank 0 and 2 on rank 1",
    "lr": "lr is 0.001 on rank 0 and 0.5 on rank 1",
    "written_weights": "parameter 'embedding.weight' was written to on rank 1 and not on rank 0",
}


def test_every_field_that_must_agree_is_tried() -> None:
    assert set(EXPECTED) == set(MUST_AGREE)


@pytest.mark.parametrize("field", sorted(EXPECTED))
def test_stops_before_any_update_and_shows_both_values(field: str) -> None:
    for message, untouched in run_ranks(2, differ, field):
        assert "the ranks have diverged; nothing was updated" in message
        assert EXPECTED[field] in message
        assert untouched
        if field == "schedule_hash":
            assert "all_to_all_single(blocks.1" in message
            assert "all_to_all_single(blocks.0" in message
            assert "on rank 0" in message
            assert "on rank 1" in message


def set_up_differently(rank: int, world: int, what: str) -> str:
    options: dict[str, Any] = {"precision": "fp32", "seed": 0}
    model = make("mlp").build(0)
    if what == "fp8":
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
        options["precision"] = ("fp8", "bf16")[rank]
    elif what == "fp8_width":  # one rank has FP8 products to decide about, the other none
        model = torch.nn.Sequential(*(torch.nn.Linear((16, 8)[rank], (16, 8)[rank]) for _ in range(3)))
        options["precision"] = "fp8"
    elif rank == 1:
        if what == "zero_stage":
            options["zero_stage"] = 1
        elif what == "lr":
            options["optimizer"] = dtrain.AdamW(lr=0.5)
        elif what == "model":
            model = make("odd_sizes").build(0)
        elif what == "seed":
            options["seed"] = 1
    try:
        dtrain.initialize(model, **options)
    except DivergenceError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("what", ["zero_stage", "lr", "model", "seed", "fp8", "fp8_width"])
def test_found_at_the_start(what: str) -> None:
    messages = run_ranks(2, set_up_differently, what)
    told = [m for m in messages if m != "accepted"]
    assert all("on rank 0" in m and "on rank 1" in m for m in told)
    assert len(told) == 2, "every rank says it"
