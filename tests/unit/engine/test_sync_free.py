"""The host reads nothing from the device in a step, and learns the decision before the next one needs it."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import dtrain
from dtrain.engine.adapters.native import NativeEngine
from dtrain.engine.outcome import StepOutcome
from dtrain.engine.vote.finalize import LazyOutcome
from dtrain.errors import NonFiniteError, UsageError
from tests.helpers.host_reads import HostRead, forbidden, like_a_gpu
from tests.helpers.one_rank import loss_of
from tests.helpers.one_rank import start as start_one
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, start
from tests.helpers.zoo import make

DYNAMIC = dtrain.LossScale("dynamic", init=64.0, growth_interval=3, hysteresis=2)


@pytest.mark.parametrize(
    ("stage", "options"),
    [(2, {"precision": "bf16", "reproducible": True}), (3, {"precision": "fp16", "loss_scale": DYNAMIC})],
)
def test_nothing_is_read_in_a_step(stage: int, options: dict[str, Any]) -> None:
    """Nor in one that overflows and the one after it; ``tests/fake`` has every option, on steps without values."""
    engine = start(Run("transformer", options={"zero_stage": stage, **options}))
    reads = like_a_gpu(engine)
    entry, device_weight = make("transformer"), torch.tensor(2.0)
    outcomes = []
    for step in range(4):
        with forbidden():
            for number, micro in enumerate(engine.accumulate([entry.batch(2 * step), entry.batch(2 * step + 1)])):
                loss = entry.loss(engine, micro)
                engine.backward((loss * 0).sqrt() if step == 2 else loss, weight=(3.0, device_weight)[number])
            # what follows the overflow is finalized by the step after it, before its first backward
            assert reads == list(range(step)), "the last step was read once, before the first backward of this one"
            outcomes.append(engine.step())
            assert reads == list(range(step)), "nothing is read in a step"
        if step == 2:  # the search for the culprit reads what it must; it is no part of a step
            assert outcomes[-1].culprit is not None
    assert [outcome.applied for outcome in outcomes] == [True, True, False, True]


CONTROLS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda loss: loss * loss.item(),
    "numpy": lambda loss: loss * loss.detach().numpy(),
    "cpu": lambda loss: loss.cpu(),
    "mask": lambda loss: loss.reshape(1)[torch.tensor([True])].sum(),
    "repeat": lambda loss: loss.repeat_interleave(torch.tensor([2])).mean(),
    "upload": lambda loss: loss * torch.tensor(2.0, device=loss.device),
}


@pytest.mark.parametrize("what", CONTROLS)
def test_deliberate_read_is_caught(what: str) -> None:
    engine, _ = lagging(zero_stage=2)
    with pytest.raises(HostRead), forbidden():
        engine.backward(CONTROLS[what](loss_of(engine)))


KINDS = ("clean", "clean", "clean", "gradient", "loss", "empty")


def lagging(**options: Any) -> tuple[NativeEngine, list[int]]:
    engine = start_one(**options)
    return engine, like_a_gpu(engine)


def attempt(engine: NativeEngine, kind: str) -> StepOutcome:
    """A step of two micro-batches, the second of which meets with something."""
    for number in engine.accumulate(range(2)):
        loss = loss_of(engine)
        if number == 1 and kind == "gradient":
            loss = (loss * 0).sqrt()
        elif number == 1 and kind == "loss":
            loss = loss * math.nan
        engine.backward(loss, weight=0.0 if kind == "empty" else 1.0 + number)
    return engine.step()


def states(engine: NativeEngine) -> list[Tensor]:
    trained = [tensor for kind in engine.states.saved_dtypes for tensor in engine.states.held(kind)]
    return [*trained, *engine.states.storages()["compute"]]


@pytest.mark.parametrize(("stage", "read_probability"), [(0, 1.0), (2, 0.0), (3, 0.5)])
def test_reading_outcomes_late_or_never_changes_no_bit(stage: int, read_probability: float) -> None:
    schedule = dtrain.Cosine(warmup_steps=5, total_steps=30)
    options: dict[str, Any] = {"precision": "bf16", "zero_stage": stage, "loss_scale": DYNAMIC, "schedule": schedule}
    prompt, (late, reads) = start_one(**options), lagging(**options)
    dice = random.Random(stage)
    expected, outcomes = [], []
    for step in range(40):
        kind = dice.choice(KINDS)
        expected.append(attempt(prompt, kind))
        outcomes.append(attempt(late, kind))
        assert reads.count(step) == 0, "nothing is read before a field is"
        if dice.random() < read_probability:
            what = dice.choice(["applied", "culprit", "grad_norm", "loss_scale"])
            assert repr(getattr(outcomes[-1], what)) == repr(getattr(expected[-1], what))
        if dice.random() < read_probability:
            assert late.loss_scale == prompt.loss_scale
            assert late.applied_steps == prompt.applied_steps
    assert {outcome.reason for outcome in expected} == {None, "overflow", "nonfinite_loss", "empty"}
    assert len({outcome.loss_scale for outcome in expected}) > 2
    for got, want in zip(outcomes, expected, strict=True):
        assert type(got) is LazyOutcome
        assert repr(asdict(got)) == repr(asdict(want))
    assert (late.loss_scale, late.applied_steps) == (prompt.loss_scale, prompt.applied_steps)
    assert all(torch.equal(a, b) for a, b in zip(states(late), states(prompt), strict=True))


def test_a_decision_is_read_before_the_next_backward() -> None:
    engine, reads = lagging(loss_scale=DYNAMIC)
    first = attempt(engine, "clean")
    loss = loss_of(engine)
    assert reads == [], "the next forward is queued before anyone waits"
    engine.backward(loss)
    assert reads == [0]
    engine.step()
    assert first.applied
    assert reads == [0], "a finalized step is not read again"
    with engine.eval():  # forwards inside may communicate, so the step is finalized first
        assert loss_of(engine).isfinite()
    assert reads == [0, 1]
    assert engine.applied_steps == 2


def test_each_outcome_field_is_read_lazily() -> None:
    want = attempt(start_one(loss_scale=DYNAMIC), "gradient")
    assert type(want) is StepOutcome, "on CPU a step is finalized at once"
    for name in StepOutcome.__dataclass_fields__:
        engine, reads = lagging(loss_scale=DYNAMIC)
        got = attempt(engine, "gradient")
        assert reads == []
        for _ in range(2):
            assert repr(getattr(got, name)) == repr(getattr(want, name))
            assert reads == [0], "read once"


def test_lazy_outcome_equals_its_values() -> None:
    engine, _ = lagging()
    outcome = attempt(engine, "gradient")
    copies = [pickle.loads(pickle.dumps(outcome)), copy.copy(outcome), copy.deepcopy(outcome)]
    other = attempt(engine, "clean")
    want = StepOutcome(**{name: getattr(outcome, name) for name in StepOutcome.__dataclass_fields__})
    assert repr(outcome) == repr(want)
    assert outcome == want == outcome
    assert len({outcome, want, other}) == 2
    assert outcome not in (other, "gradient")
    with pytest.raises(AttributeError, match="aplied"):
        outcome.aplied  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError):
        outcome.applied = True  # type: ignore[misc]
    for copied in copies:
        assert type(copied) is StepOutcome
        assert repr(asdict(copied)) == repr(asdict(outcome)) == repr(asdict(want))


def only_rank_0_reads(rank: int, world: int, stage: int) -> list[str]:
    """Rank 0 reads the culprit at once, rank 1 continues and reads it at the end."""
    engine = start(Run("transformer", options={"precision": "bf16", "zero_stage": stage, "loss_scale": DYNAMIC}))
    like_a_gpu(engine)
    entry, outcomes = make("transformer"), []
    for step in range(6):
        loss = entry.loss(engine, entry.batch(2 * step + rank))
        if rank == 1 and step % 3 == 1:
            loss = (loss * 0).sqrt()
        engine.backward(loss * (math.nan if rank == 1 and step % 3 == 2 else 1.0))
        outcomes.append(engine.step())
        if rank == 0 and step != 5:
            assert (outcomes[-1].culprit is None) is outcomes[-1].applied
    return [repr(asdict(outcome)) for outcome in outcomes]


@pytest.mark.processes
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_may_read_outcomes_at_different_times(stage: int) -> None:
    first, second = run_ranks(2, only_rank_0_reads, stage)
    assert first == second
    for step, text in enumerate(first):
        assert f"'reason': {(None, 'overflow', 'nonfinite_loss')[step % 3]!r}" in text
    assert "'phase': 'local gradient', 'micro_batch': 0, 'tensor': 'blocks.1.ffn.2.bias'" in first[1]


NEXT_CALLS: dict[str, Callable[[NativeEngine, StepOutcome, Path], Any]] = {
    "backward": lambda engine, *_: engine.backward(loss_of(engine)),
    "step": lambda engine, *_: engine.step(),
    "save": lambda engine, _, path: engine.save(path),
    "load": lambda engine, _, path: engine.load(path),
    "master_state": lambda engine, *_: engine.master_state(),
    "eval": lambda engine, *_: engine.eval().__enter__(),
    "applied_steps": lambda engine, *_: engine.applied_steps,
    "loss_scale": lambda engine, *_: engine.loss_scale,
    "culprit": lambda _, outcome, __: outcome.culprit,
}


@pytest.mark.parametrize("call", NEXT_CALLS)
def test_an_error_is_raised_by_the_next_call(call: str, tmp_path: Path) -> None:
    for weight, reason, error, message in (
        (1.0, "overflow", NonFiniteError, "2 steps in a row were skipped"),
        (-1.0, "bad_weight", UsageError, "the weight of micro-batch 0 of step 1 on rank 0 is negative or not finite"),
    ):
        engine, reads = lagging(max_consecutive_skips=2)
        attempt(engine, "gradient")
        before = [tensor.clone() for tensor in states(engine)]
        engine.backward((loss_of(engine) * 0).sqrt(), weight=torch.tensor(weight))
        outcome = engine.step()
        assert reads == [0]
        with pytest.raises(error, match=message):
            NEXT_CALLS[call](engine, outcome, tmp_path)
        assert (engine.applied_steps, outcome.reason) == (0, reason)
        assert all(torch.equal(a, b) for a, b in zip(before, states(engine), strict=True))


@pytest.mark.parametrize("verb", ["save", "load"])
def test_a_step_is_finalized_before_frozen_weights_are_made_whole(verb: str, tmp_path: Path) -> None:
    """Both may communicate, and finalizing a skipped step runs forwards, which leave weights unsharded."""
    engine, calls = start_one(), mock.Mock()
    engine.save(tmp_path)
    calls.whole_frozen.return_value = nullcontext()
    with (
        mock.patch.multiple(engine.states, whole_frozen=calls.whole_frozen, release=calls.release),
        mock.patch.object(engine._between, "_finalize", calls.finalize),
    ):
        getattr(engine, verb)(tmp_path / "other" if verb == "save" else tmp_path)
    expected = ["finalize", "release", "whole_frozen"] if verb == "load" else ["finalize", "whole_frozen"]
    assert [name for name, *_ in calls.mock_calls][: len(expected)] == expected
