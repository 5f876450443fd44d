"""Audits and replays: no alarm for what is legal, and a flipped bit or a wrong kernel is found and named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.engine.step import StepEngine
from dtrain.errors import CorruptionError
from dtrain.parameters.model_states import MASTER
from tests.engines.helpers import batch, held, same, state_digests, train_step
from tests.engines.matrix import Case, Trial, check
from tests.helpers.bit_flips import flip_bit


def flip_master(engine: StepEngine, rank: int) -> str:
    """Flips a mantissa bit that an update does not round off; returns the parameter."""
    engine.comm.barrier()  # the other ranks may still gather from this one
    if engine.rank != rank:
        return ""
    shard = next(shard for shard in engine.states.local_shards(MASTER) if shard.data.numel())
    flip_bit(shard.data, 0, 20)
    return shard.name


def corruptions(action: Any) -> list[tuple[tuple[int, ...], str, str]]:
    with pytest.raises(CorruptionError) as caught:
        action()
    return [(item.ranks, item.tensor, item.kind) for item in caught.value.corruptions]


@torch.no_grad()
def write_in_place(engine: StepEngine) -> None:
    if engine.name == "ddp" or (engine.name == "native" and engine.options.zero_stage < 3):
        engine.comm.barrier()  # as in flip_master
        engine.module.get_parameter("mix.weight").mul_(0.5)


def legal_acts(engine: StepEngine, folder: Path, micro_batches: int) -> None:
    """Everything that changes states between steps, each followed by an audited step, and by a save."""
    train_step(engine, micro_batches)
    engine.save(folder)
    write_in_place(engine)
    train_step(engine, micro_batches)
    engine.backward(engine(tokens=batch(0)) * math.inf)
    assert not engine.step().applied
    train_step(engine, micro_batches)
    write_in_place(engine)
    engine.save(folder, asynchronous=True)
    train_step(engine, micro_batches)
    with engine.modify_weights("mix.*"):
        engine.module.get_parameter("mix.bias").fill_(0.25)
    engine.expect_save()
    train_step(engine, micro_batches)
    engine.save(folder)
    if engine.ema_decay is not None:
        with engine.ema(), engine.eval():
            engine(tokens=batch(0))
    engine.master_state()
    train_step(engine, micro_batches)
    # on all ranks: writes that no counter shows, as of a teacher's weights or a codebook
    engine.module.get_buffer("table").data.mul_(0.5)
    if engine.options.zero_stage < 3:
        engine.module.get_parameter("frozen.bias").data.mul_(0.5)
    train_step(engine, micro_batches)
    engine.module.get_buffer("table").add_(engine.rank)  # of each rank its own, as batch norm's
    train_step(engine, micro_batches)
    engine.load(folder)
    train_step(engine, micro_batches)
    write_in_place(engine)
    engine.save(folder / "last")


@check(
    precisions=("bf16", "fp32"),
    ranks=(2, 1),
    variants={
        "ema": {"ema_decay": 0.9},
        "muon": {"optimizer": dtrain.Muon(lr=3e-3)},
        "adamw-bf16": {"optimizer": dtrain.AdamWBF16(lr=3e-3)},
        "torch": {"optimizer": dtrain.TorchOptimizer(torch.optim.SGD, lr=1e-2, momentum=0.9)},
    },
    unless=lambda case: case.variant == "muon" and case.engine == "deepspeed",
)
def audits_raise_for_a_flipped_bit_and_nothing_else(trial: Trial) -> None:
    engine, last = trial.start(audit=1, wide=True), trial.ranks - 1  # each rank holds a master
    engine.module.register_buffer("table", torch.arange(5.0))
    legal_acts(engine, trial.folder, trial.ranks)
    train_step(engine, trial.ranks)
    name = flip_master(engine, last)
    found = corruptions(lambda: train_step(engine, trial.ranks))
    assert [item[0::2] for item in found] == [((last,), MASTER)]
    assert trial.rank != last or found[0][1] == name


@check(engines=("native", "ddp"), stages=(0, 1), ranks=(2, 3))
def without_a_record_the_majority_judges_or_the_pair_is_named(trial: Trial) -> Any:
    """A flip after a step that is not audited; the save compares the copies of the ranks."""
    engine = trial.start(audit=dtrain.Audit(every=1000))
    train_step(engine, trial.ranks)
    flip_master(engine, 0)
    found = corruptions(lambda: engine.save(trial.folder))
    with pytest.raises(CorruptionError):
        engine.backward(torch.zeros((), requires_grad=True))
    copies = trial.case == Case("native", 1)  # of the replica only: each master is on one rank
    kind = f"compute replica or {MASTER}" if copies else MASTER
    assert [item[0::2] for item in found] == [((0, 1) if trial.ranks == 2 else (0,), kind)]
    assert not list(trial.folder.glob("step-*"))
    return found


def flaky(engine: StepEngine, rank: int, *, in_backward: bool) -> Any:
    """A kernel's output that is wrong by one bit in its last call of a replayed step."""
    calls = 0

    def on_forward(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls != 3 or engine.rank != rank:  # the forward of the one micro-batch, then two that are compared
            return output
        if in_backward:
            output.register_hook(flipped)
            return output
        return output + (flipped(output.detach()) - output.detach())

    return engine.module.get_submodule("blocks.0.down").register_forward_hook(on_forward)


def flipped(values: Tensor) -> Tensor:
    copy = values.clone(memory_format=torch.contiguous_format)
    flip_bit(copy, copy.numel() // 2, 8 * copy.element_size() - 3)  # of the exponent
    return copy


@check(engines=("native", "ddp", "fsdp2"), precisions=("fp32", "bf16"), ranks=(2, 1))
def replays_find_wrong_arithmetic_and_leave_no_trace(trial: Trial) -> None:
    once, twice = (trial.start(dropout=0.1, audit=dtrain.Audit(every=0, replay_every=n)) for n in (0, 2))
    for _ in range(2):
        assert train_step(once, trial.ranks) == train_step(twice, trial.ranks)
    assert state_digests(once) == state_digests(twice)
    for in_backward in (False, True):
        train_step(twice, trial.ranks)
        handle = flaky(twice, trial.ranks - 1, in_backward=in_backward)
        before = held(twice)
        found = corruptions(lambda: train_step(twice, trial.ranks))
        handle.remove()
        (culprits, name, kind), *_ = found
        # a single rank sees that its forward differs, and not which of them is wrong
        want = ("gradient", True) if in_backward else ("loss", False)
        assert (kind, name.startswith("blocks.0.down")) == want, found
        assert {item[0] for item in found} == {(trial.ranks - 1,)} == {culprits}
        assert same(held(twice), before), "it updated"
        train_step(twice, trial.ranks)
