"""The loop's cadence, stops and numbers, with an engine that only counts; test_run has the real one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain.checkpoint import Retention
from dtrain.config.model import ModelConfig
from dtrain.config.schema import CheckpointConfig, RunConfig, TrainConfig
from dtrain.data import Dataset, SampleSource
from dtrain.data.loader import validation_batches
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.transport.choose import make_communicator
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.engine.interface import Engine
from dtrain.engine.outcome import Culprit, StepOutcome
from dtrain.engine.vote.finalize import LazyOutcome
from dtrain.errors import CheckpointError, CommunicationError, CorruptionError, ModelError, NonFiniteError
from dtrain.tasks import Language
from dtrain.telemetry.metrics import Sink, StepMetrics
from dtrain.train import trainer
from dtrain.train.session import Session
from dtrain.train.signals import StopSignals
from dtrain.train.trainer import SaveOptions, Trainer, TrainResult
from dtrain.train.validation import to_device, validate
from tests.helpers.ranks import run_ranks

_BATCH = 4
SYNCHRONOUS = CheckpointConfig(asynchronous=False, keep_last=3, keep_every=7)
ASYNCHRONOUS = replace(SYNCHRONOUS, asynchronous=True)
SKIPPING = replace(ASYNCHRONOUS, when_busy="skip")


class _Source(SampleSource):
    num_samples = 50

    def batch(self, sample_ids: Any) -> dict[str, Tensor]:
        x = torch.from_numpy(np.asarray(sample_ids))
        return {"x": x, "targets": x}


class _CountingEngine:
    """Fake engine that records the calls of the loop."""

    def __init__(
        self, attempted_steps: int = 0, skip: Iterable[int] = (), comm: Communicator | None = None, *,
        is_synchronous: bool = True, busy_until: int = 0,
    ) -> None:  # fmt: skip
        self.busy, self.policy = SimpleNamespace(latest=None), SimpleNamespace(name="fp32")
        self.compiled_graphs = self.float8_gap = None
        self.is_synchronous, self.ema_decay = is_synchronous, None
        self.reads: list[tuple[int, int]] = []  # (step whose outcome is read, steps taken by then), if lazy
        self.attempted_steps = self.applied_steps = self.loaded_steps = attempted_steps
        self.data_cursor = attempted_steps * _BATCH
        self.skip = frozenset(skip)
        self.comm = comm if comm is not None else SingleRank(torch.device("cpu"))
        self.device, self.rank, self.world_size = self.comm.device, self.comm.rank, self.comm.world_size
        self.events: list[str] = []
        self.cursors: list[int] = []
        self.expected: list[int] = []  # steps after which a save was announced
        self.saved_cursors: list[int] = []
        self.metrics: list[dict[str, float | None]] = []
        self.retention = Retention(3, 7)
        self.busy_until = busy_until  # the step from which no save is running
        self.failure: Exception | None = None  # raised by the next step
        self.before_backward: Callable[[int], None] = lambda step: None
        self._stop = False

    def accumulate(self, batch: list[Any]) -> Iterator[Any]:
        yield from batch

    def __call__(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": x.double().mean().float()}

    def backward(self, output: dict[str, Tensor], *, weight: float) -> None:
        self.before_backward(self.attempted_steps + 1)
        assert output["loss"].dim() == 0
        assert weight == 1.0

    def copy_buffers(self) -> None:
        pass

    def request_stop(self) -> None:
        self._stop = True

    def expect_save(self) -> None:
        self.expected.append(self.attempted_steps + 1)

    def _raise_failure(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def step(self) -> StepOutcome:
        self._raise_failure()
        outcome, step = self._step(), self.attempted_steps
        if self.is_synchronous:
            return outcome

        def read() -> StepOutcome:
            self.reads.append((step, self.attempted_steps))
            return outcome

        return LazyOutcome(read, read)

    def _step(self) -> StepOutcome:
        self.cursors.append(self.data_cursor)
        self.attempted_steps += 1
        if self.attempted_steps in self.skip:
            culprit = Culprit(1, self.attempted_steps - 1, "reduced gradient", None, "head", 2, 5, num_nan=3)
            return StepOutcome(False, "overflow", float("nan"), 2.0, float("inf"), 8.0, 0.1, culprit, self._stop)
        self.applied_steps += 1
        return StepOutcome(True, None, 1.0 / self.attempted_steps, 2.0, 1.0, 8.0, 0.1, None, self._stop)

    @contextmanager
    def eval(self) -> Iterator[None]:
        yield

    def save(
        self, directory: Path, *, extra: Any, config: Any, metrics: dict[str, float | None], retention: Retention,
        asynchronous: bool, when_busy: str,
    ) -> Path | None:  # fmt: skip
        assert (config, retention) == ({"c": 1}, self.retention)
        assert extra == {"e": 1, "tokens": 1000 + _BATCH * (self.applied_steps - self.loaded_steps)}
        if when_busy == "skip" and self.is_saving():
            return None
        self._raise_failure()
        self.events.append(f"{'start' if asynchronous else 'save'} {self.attempted_steps}")
        self.saved_cursors.append(self.data_cursor)
        self.metrics.append(metrics)
        return directory

    def prepare_saves(self) -> None:
        assert self.attempted_steps == self.loaded_steps
        self.events.append("prepare")

    def is_saving(self) -> bool:
        return self.busy_until > self.attempted_steps

    def wait_for_save(self) -> None:
        self.events.append("wait")

    def leave_save(self, *, cancel: bool) -> None:
        self.events.append("give up" if cancel else "leave")


class _Sink:
    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.steps: list[StepMetrics] = []

    def step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)

    def validation(self, step: int, losses: Mapping[str, float]) -> None:
        self.events.append(f"eval {step}")


def _train(
    engine: _CountingEngine, *, stop_at: int | None = None, saving: CheckpointConfig = SYNCHRONOUS,
    sink: _Sink | None = None, **config: int,
) -> tuple[TrainResult, _Sink]:  # fmt: skip
    stop, sink = SimpleNamespace(requested=stop_at == 0), sink or _Sink(engine.events)
    sizes = {"micro_batch_size": 2, "global_batch_size": _BATCH, "eval_batches": 3}
    run_config = RunConfig(train=TrainConfig(**sizes, **config), model=ModelConfig(max_seq_len=1))
    hook = engine.before_backward

    def interrupted(step: int) -> None:
        stop.requested = stop.requested or (stop_at is not None and step >= stop_at)
        hook(step)

    engine.before_backward = interrupted
    engine.retention = Retention(saving.keep_last, saving.keep_every, saving.keep_best)
    trainer = Trainer(
        Session(cast(Engine, engine), run_config, Dataset(_Source(), _Source(), "", "", Language(50))),
        SaveOptions(Path("checkpoints"), settings={"c": 1}, extra={"e": 1}, config=saving),
        stop=cast(StopSignals, stop),
        sinks=[cast(Sink, sink)],
        tokens_before=1000,
    )
    return trainer.run(), sink


@dataclass(frozen=True)
class Case:
    """A training, its saves and evaluations in their order, and whether it finishes."""

    config: dict[str, int]
    events: str
    saving: CheckpointConfig = SYNCHRONOUS
    stop_at: int | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    finished: bool = True


def _every(steps: int, evaluate: int, save: int, log: int = 100) -> dict[str, int]:
    return {"steps": steps, "eval_every": evaluate, "save_every": save, "log_every": log}


def _stopped(stop_at: int, events: str, **more: Any) -> Case:
    """The engine itself waits for the save before that of the stop, which is committed when the loop returns."""
    return Case(_every(9, 0, 0), events, stop_at=stop_at, finished=False, **more)


_LAZY = {"is_synchronous": False}
_BEST = replace(ASYNCHRONOUS, keep_best=1)
CASES = {
    "cadence": Case(_every(7, 2, 3), "eval 2, save 3, eval 4, eval 6, save 6, save 7, eval 7, wait"),
    "at the end anyway": Case(_every(4, 4, 4), "eval 4, save 4, wait"),
    "no save at the end": Case(_every(4, 0, 3), "save 3, eval 4, wait", replace(SYNCHRONOUS, save_at_end=False)),
    "the last evaluation overlaps": Case(_every(5, 0, 3), "prepare, start 3, start 5, eval 5, wait", ASYNCHRONOUS),
    "stop, asynchronous": _stopped(4, "prepare, save 4", saving=ASYNCHRONOUS),
    # a save is skipped while one runs, but neither the last one nor that of a stop
    "busy": Case(_every(9, 0, 3), "prepare, start 9, eval 9, wait", SKIPPING, engine={"busy_until": 100}),
    "busy, stop": Case(_every(9, 0, 3), "prepare, save 6", SKIPPING, 6, {"busy_until": 100}, finished=False),
    "best": Case(_every(5, 4, 2), "prepare, eval 2, start 2, eval 4, start 4, eval 5, start 5, wait", _BEST),
    "best, busy": Case(_every(5, 0, 2), "prepare, eval 4, start 4, eval 5, start 5, wait",
                       replace(_BEST, when_busy="skip"), engine={"busy_until": 4}),
    "loaded": Case(_every(7, 0, 5), "save 7, eval 7, wait", engine={"attempted_steps": 5}),
    "no steps left": Case(_every(7, 1, 1), "eval 9, wait", engine={"attempted_steps": 9}),
    "stop before the first step": _stopped(0, "save 1"),
    "stop later": _stopped(3, "save 3"),
    "stop in the last step": Case(_every(4, 0, 0), "save 4, eval 4, wait", stop_at=4),
    # an engine that is not synchronous tells of a stop one step later, unless a log line is due
    "lazy stop": replace(_stopped(3, "save 4", engine=_LAZY), config=_every(9, 0, 0, log=4)),
    "lazy stop, line due": replace(_stopped(4, "save 4", engine=_LAZY), config=_every(9, 0, 0, log=4)),
    "lazy stop, first step": replace(_stopped(1, "save 2", engine=_LAZY), config=_every(9, 0, 0, log=4)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_saves_and_evaluations(name: str) -> None:
    case = CASES[name]
    engine = _CountingEngine(**case.engine)
    result, sink = _train(engine, stop_at=case.stop_at, saving=case.saving, **case.config)
    assert engine.events == case.events.split(", ")
    assert result.finished is case.finished
    assert result.tokens == 1000 + _BATCH * (engine.attempted_steps - engine.loaded_steps)
    assert engine.cursors == [_BATCH * step for step in range(engine.loaded_steps, engine.attempted_steps)]
    saved = [int(event.split()[1]) for event in case.events.split(", ") if event.startswith(("save", "start"))]
    assert engine.saved_cursors == [_BATCH * step for step in saved], "the next sample, not the last one"
    assert (case.stop_at is not None or case.saving.when_busy == "skip") or engine.expected == saved
    assert not case.saving.keep_best or all(metrics["val_loss"] is not None for metrics in engine.metrics)
    if engine.cursors:
        assert [m.step for m in sink.steps][-1] == engine.attempted_steps
        assert result.train_loss == 1 / engine.attempted_steps
    else:
        assert (sink.steps, result.train_loss, result.timing.steps) == ([], None, 0)


_FAILURE = CheckpointError("saving step 3 failed on rank 1")


@pytest.mark.parametrize(("fails_before", "fails_at"), [("backward", 6), ("save", 6), ("backward", 7)])
def test_a_stop_is_saved_although_the_save_before_it_fails(fails_before: str, fails_at: int) -> None:
    """The stop arrives in step 6, whose own step or save tells of the failure, or nothing does."""
    engine = _CountingEngine()
    step = engine.step

    def fail_at(now: int) -> None:
        if now == fails_at:
            engine.failure = _FAILURE

    def failing_save() -> StepOutcome:
        outcome = step()
        fail_at(engine.attempted_steps)
        return outcome

    if fails_before == "save":
        engine.step = failing_save  # type: ignore[method-assign]
    else:
        engine.before_backward = fail_at
    result, sink = _train(engine, stop_at=6, saving=ASYNCHRONOUS, steps=9, log_every=1, eval_every=0, save_every=3)
    assert engine.events == ["prepare", "start 3", "save 6"]
    assert [m.step for m in sink.steps] == [1, 2, 3, 4, 5, 6]
    assert not result.finished


def test_a_stop_that_only_another_rank_has_seen_is_saved_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "on_every_rank", lambda *_: [False, True])
    engine = _CountingEngine()
    engine.before_backward = lambda step: setattr(engine, "failure", _FAILURE if step == 6 else None)
    result, _ = _train(engine, saving=ASYNCHRONOUS, steps=9, log_every=1, eval_every=0, save_every=3)
    assert engine.events == ["prepare", "start 3", "save 6"]
    assert not result.finished


@pytest.mark.parametrize(
    ("error", "raised_by", "event"),
    [
        (_FAILURE, "step", "leave"),
        (CorruptionError("step 4: the audit found changed bits"), "step", "leave"),
        (RuntimeError("CUDA error: an illegal memory access"), "backward", "leave"),
        (CommunicationError("another rank has died"), "backward", "give up"),
        (RuntimeError("[../third_party/gloo/...] Connection closed by peer"), "backward", "give up"),
    ],
)
@pytest.mark.parametrize("is_synchronous", [True, False])
def test_a_failing_run_leaves_no_thread_and_a_failure_of_all_ranks_loses_no_line(
    error: Exception, raised_by: str, event: str, is_synchronous: bool
) -> None:
    engine, sink = _CountingEngine(skip=(4,), is_synchronous=is_synchronous), _Sink([])

    def fail(step: int) -> None:
        if step == 5:
            engine.failure = error
            if raised_by == "backward":
                raise error

    engine.before_backward = fail
    with pytest.raises(type(error)) as raised:
        _train(engine, sink=sink, saving=ASYNCHRONOUS, steps=9, log_every=3, eval_every=0, save_every=3)
    assert raised.value is error
    assert engine.events == ["prepare", "start 3", event]
    if raised_by == "step":
        assert [m.step for m in sink.steps] == [3, 4], "the last outcome of a lazy engine had not been read"


@pytest.mark.parametrize("where", ["step", "read", "next backward"])
def test_the_skip_that_ends_the_run_is_reported_once(where: str) -> None:
    """The step raises the error, or the first read of its outcome, or a later call."""
    engine, sink = _CountingEngine(skip=(2, 3), is_synchronous=where == "step"), _Sink([])
    step, last = engine.step, list[StepOutcome]()

    def end() -> StepOutcome:
        raise NonFiniteError("2 steps in a row were skipped", last[0])

    def ending_step() -> StepOutcome:
        outcome = step()
        if engine.attempted_steps < 3:
            return outcome
        last.append(outcome)
        if where == "read":  # of the culprit, which raises
            return LazyOutcome(lambda: outcome, end)
        return end() if where == "step" else outcome

    engine.step = ending_step  # type: ignore[method-assign]
    engine.before_backward = lambda number: end() and None if number == 4 else None
    with pytest.raises(NonFiniteError, match="2 steps in a row"):
        _train(engine, sink=sink, steps=9, log_every=3 if where == "read" else 100, eval_every=0, save_every=0)
    assert [(m.step, m.reason, m.skipped_steps) for m in sink.steps] == [(2, "overflow", 1), (3, "overflow", 2)]


def test_every_skip_is_logged_with_its_culprit_and_a_checkpoint_has_the_losses_of_its_own_step() -> None:
    engine = _CountingEngine(skip=(2, 5))
    result, sink = _train(engine, steps=6, log_every=6, eval_every=4, save_every=2)
    assert [metrics["train_loss"] for metrics in engine.metrics] == [1, 1 / 4, 1 / 6]  # the last applied step's
    assert [metrics["val_loss"] for metrics in engine.metrics] == [None, pytest.approx(24.5, abs=25), None]
    found = [(m.step, m.applied, m.skipped_steps, m.tokens, m.reason) for m in sink.steps]
    assert found == [(2, False, 1, 1004, "overflow"), (5, False, 2, 1012, "overflow"), (6, True, 2, 1016, None)]
    assert sink.steps[0].culprit == "reduced gradient of 'head'[2:5] not finite (3 NaN); owner of the shard: rank 1"
    assert sink.steps[0].evidence is not None
    assert (sink.steps[0].evidence["start"], sink.steps[0].evidence["num_nan"]) == (2, 3)
    assert sink.steps[2].culprit is None
    assert (result.train_loss, result.tokens) == (1 / 6, 1016)


def test_reports_do_not_synchronize_the_device() -> None:
    cadence = {"steps": 11, "log_every": 4, "eval_every": 6, "save_every": 9}
    eager, late = _CountingEngine(skip=(2, 7)), _CountingEngine(skip=(2, 7), is_synchronous=False)
    (want, eager_sink), (got, late_sink) = _train(eager, **cadence), _train(late, **cadence)
    due = {4, 6, 8, 9, 11}  # a log line, an evaluation or a save is due
    assert set(late.reads) == {(step, step if step in due else step + 1) for step in range(1, 12)}

    def lines(sink: _Sink) -> list[tuple[Any, ...]]:
        return [(m.step, m.loss, m.applied, m.skipped_steps, m.tokens, m.reason, m.culprit) for m in sink.steps]

    assert repr(lines(late_sink)) == repr(lines(eager_sink))
    assert [line[0] for line in lines(late_sink)] == [2, 4, 7, 8, 11]
    assert late.events == eager.events
    assert (got.train_loss, got.tokens, got.finished) == (want.train_loss, want.tokens, want.finished)


@settings(max_examples=25)
@given(
    steps=st.integers(1, 12), cut=st.integers(1, 12), eval_every=st.integers(0, 5), save_every=st.integers(0, 5),
    log_every=st.integers(1, 5),
)  # fmt: skip
def test_stop_and_resume_change_no_data_and_no_evaluation(
    steps: int, cut: int, eval_every: int, save_every: int, log_every: int
) -> None:
    config = _every(steps, eval_every, save_every, log_every)
    whole, first = _CountingEngine(), _CountingEngine()
    _train(whole, **config)
    _train(first, stop_at=min(cut, steps), **config)
    second = _CountingEngine(attempted_steps=first.attempted_steps)
    _train(second, **config)
    assert first.cursors + second.cursors == whole.cursors

    def evaluated(events: list[str]) -> set[str]:
        return {event for event in events if event.startswith("eval") and event != f"eval {first.attempted_steps}"}

    assert evaluated(first.events) | evaluated(second.events) == evaluated(whole.events)


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_at_certain_steps_and_after_a_validation_or_save() -> None:
    engine, made, alive = _CountingEngine(), list[weakref.ref[_Cycle]](), list[tuple[int, bool]]()

    def before_backward(step: int) -> None:
        if len(alive) < step:  # else it is the step's second micro-batch
            alive.append((sum(ref() is not None for ref in made), gc.isenabled()))
            made.append(weakref.ref(_Cycle()))

    engine.before_backward = before_backward
    _train(engine, collect_garbage_every=5, **_every(13, 7, 9))
    assert [enabled for _, enabled in alive] == [True, True, *[False] * 11]
    # before the steps 3 to 13: the second step, the fifth and tenth, a validation after 7, a save after 9
    assert [count for count, _ in alive[2:]] == [0, 1, 2, 0, 1, 0, 1, 0, 0, 1, 2]
    assert gc.isenabled()
    engine.failure = RuntimeError("a step fails")
    engine.attempted_steps = 3
    with pytest.raises(RuntimeError, match="a step fails"):
        _train(engine, collect_garbage_every=5, **_every(13, 7, 9))
    assert gc.isenabled()


def test_a_batch_goes_to_a_gpu_from_pinned_memory() -> None:
    def copied(device: str, memory: str = "pageable") -> Mock:
        made = Mock(device=torch.device(device), pin_memory=lambda: copied("cpu", "pinned"))
        made.to = lambda device, *, non_blocking: (memory, non_blocking)
        return made

    batch: dict[str, Any] = {"tokens": copied("cpu"), "resident": copied("cuda:0")}
    assert to_device(batch, torch.device("cuda", 0)) == {"tokens": ("pinned", True), "resident": ("pageable", True)}
    assert to_device({"tokens": batch["tokens"]}, torch.device("cpu")) == {"tokens": ("pageable", True)}


def _validate(rank: int, world: int) -> list[float]:
    import torch.distributed as dist

    comm = make_communicator(dist.group.WORLD if world > 1 else None, torch.device("cpu"))
    engine = cast(Engine, _CountingEngine(comm=comm))
    task = Language(50)
    return [validate(engine, task, validation_batches(_Source(), 7, n, rank, world))["loss"] for n in (1, 5, 100)]


@pytest.mark.processes
def test_validation_loss_has_the_same_bits_at_any_world_size() -> None:
    losses = [loss for world in (1, 3) for loss in run_ranks(world, _validate)]
    assert losses == losses[:1] * 4
    assert losses[0][-1] == pytest.approx(49 / 2)  # all 50 samples, each once


def test_a_model_without_a_loss_is_named() -> None:
    engine = _CountingEngine()
    engine.__class__ = type("Lossless", (_CountingEngine,), {"__call__": lambda self, x, targets: {"logits": x}})
    with pytest.raises(ModelError, match=r"must return its loss .*got a dict"):
        validate(cast(Engine, engine), Language(50), validation_batches(_Source(), 2, 1))
