"""Inf and NaN on each rank in turn: skipped by all or applied by all, the scale right, nothing touched by a skip."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import dtrain
from dtrain.engine.native import NativeEngine
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, forward_backward, start

RUN = Run("transformer", accumulation=2, options={"precision": "fp16", "loss_scale": "dynamic"})
SCALE = 256.0


def make_engine(stage: int) -> NativeEngine:
    scale = dtrain.LossScale(mode="dynamic", init=SCALE)
    return start(RUN.with_options(zero_stage=stage, loss_scale=scale))


def snapshot(engine: NativeEngine) -> list[torch.Tensor]:
    state = engine.state
    tensors = [state.master, state.exp_avg, state.exp_avg_sq, *(replica.flat for replica in state.replicas)]
    return [tensor.clone() for tensor in tensors]


def poison_gradient(engine: NativeEngine, parameter: int, value: float) -> Any:
    """Replaces one element of a parameter's gradient as autograd delivers it; returns the handle."""
    name = engine.state.parameter_names[parameter]
    target = dict(engine.module.named_parameters())[name]

    def poison(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad.view(-1)[-1] = value
        return grad

    return target.register_hook(poison)


def faults(rank: int, world: int, stage: int) -> list[tuple[str, dtrain.StepOutcome, bool, float, dtrain.StepOutcome]]:
    engine = make_engine(stage)
    found = []
    step = 0
    cases = [
        (kind, victim, value)
        for kind in ("loss", "first", "last")
        for victim in range(world)
        for value in (math.inf, math.nan)
    ]
    for kind, victim, value in cases:
        before = snapshot(engine)
        handle = None
        if rank == victim and kind != "loss":
            handle = poison_gradient(engine, 0 if kind == "first" else -1, value)
        poison = value if rank == victim and kind == "loss" else 1.0
        forward_backward(engine, RUN, step, loss_factor=poison)
        outcome = engine.step()
        if handle is not None:
            handle.remove()
        untouched = all(torch.equal(a, b) for a, b in zip(before, snapshot(engine), strict=True))
        scale_after = engine.loss_scale.scale
        forward_backward(engine, RUN, step + 1)
        clean = engine.step()
        found.append((f"{kind} {value} on rank {victim}", outcome, untouched, scale_after, clean))
        step += 2
    assert engine.attempted_steps == 2 * len(cases)
    assert engine.applied_steps == len(cases), "the schedule counts applied steps only"
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_skipped_by_all_and_untouched(world: int, stage: int) -> None:
    ranks = run_ranks(world, faults, stage)
    scale = SCALE
    for number, (what, outcome, untouched, scale_after, clean) in enumerate(ranks[0]):
        is_loss = what.startswith("loss")
        assert not outcome.applied, what
        assert outcome.reason == ("nonfinite_loss" if is_loss else "overflow"), what
        assert outcome.loss_scale == scale, what
        scale = scale if is_loss else scale / 2
        assert scale_after == scale, f"{what}: a bad loss leaves the scale, a bad gradient halves it"
        assert untouched, f"{what}: masters, moments or replicas changed"
        assert clean.applied, f"{what}: the next clean step must apply"
        assert outcome.culprit is not None
        if is_loss:
            assert outcome.culprit.phase == "forward loss"
            assert outcome.culprit.rank == int(what[-1])
            assert outcome.culprit.micro_batch == 0
        else:
            assert outcome.culprit.phase == "reduced gradient"
            assert outcome.culprit.tensor is not None
        for other in ranks[1:]:
            _, other_outcome, other_untouched, other_scale, other_clean = other[number]
            assert repr(other_outcome) == repr(outcome), f"{what}: ranks disagree"  # NaN != NaN, so by text
            assert repr(other_clean) == repr(clean)
            assert other_untouched
            assert other_scale == scale_after


def names_of_bad_tensor(rank: int, world: int) -> list[tuple[str, str | None]]:
    engine = make_engine(2)
    found = []
    for index in (0, len(engine.state.parameter_names) - 1):
        handle = poison_gradient(engine, index, math.inf) if rank == world - 1 else None
        forward_backward(engine, RUN, 0)
        outcome = engine.step()
        if handle is not None:
            handle.remove()
        found.append((engine.state.parameter_names[index], outcome.culprit.tensor if outcome.culprit else None))
    return found


def test_the_tensor_at_fault_is_named() -> None:
    for rank in run_ranks(2, names_of_bad_tensor):
        for expected, got in rank:
            assert got == expected


def overflow_then_recover(rank: int, world: int) -> list[dtrain.StepOutcome]:
    """The real thing: a scale so large that FP16 gradients overflow until it has backed off far enough."""
    engine = start(RUN.with_options(loss_scale=dtrain.LossScale(mode="dynamic", init=2.0**24)))
    outcomes = []
    for step in range(30):
        forward_backward(engine, RUN, step)
        outcomes.append(engine.step())
    return outcomes


def test_the_scale_backs_off_until_steps_apply() -> None:
    first, second = run_ranks(2, overflow_then_recover)
    applied = [outcome.applied for outcome in first]
    assert not applied[0]
    assert all(applied[applied.index(True) :])
    assert [o.loss_scale for o in first] == [o.loss_scale for o in second]
    skipped = applied.index(True)
    assert first[skipped].loss_scale == 2.0 ** (24 - skipped)
