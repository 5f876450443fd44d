"""The loop's cadence, stops and numbers, with an engine that only counts; test_run has the real one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain.checkpoint import Retention
from dtrain.config.schema import CheckpointConfig, TrainConfig
from dtrain.data import BatchLoader, SampleSource
from dtrain.data.loader import validation_batches
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.setup import make_communicator
from dtrain.distributed.single_rank import SingleRank
from dtrain.engine.interface import Engine
from dtrain.engine.outcome import Culprit, StepOutcome
from dtrain.engine.vote.finalize import LazyOutcome
from dtrain.errors import CheckpointError, CommunicationError, CorruptionError, ModelError, NonFiniteError
from dtrain.tasks import Language
from dtrain.telemetry.metrics import StepMetrics
from dtrain.telemetry.precision import PrecisionFindings
from dtrain.train.signals import StopSignals
from dtrain.train.trainer import SaveOptions, Trainer, TrainingData, TrainResult
from dtrain.train.validation import to_device, validate
from tests.helpers.ranks import run_ranks

_BATCH = 4
RETENTION = Retention(keep_last=3, keep_every=7)
SYNCHRONOUS = CheckpointConfig(asynchronous=False, keep_last=3, keep_every=7)


class _Source(SampleSource):
    num_samples = 50

    def batch(self, sample_ids: Any) -> dict[str, Tensor]:
        x = torch.from_numpy(np.asarray(sample_ids))
        return {"x": x, "targets": x}


class _Stop(StopSignals):
    """A stop signal that arrives during a given step."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted = False

    @property
    def requested(self) -> bool:
        return self.wanted


class _CountingEngine:
    """Fake engine that records the calls of the loop."""

    def __init__(
        self,
        attempted_steps: int = 0,
        skip: Iterable[int] = (),
        comm: Communicator | None = None,
        *,
        is_synchronous: bool = True,
    ) -> None:
        self.busy = SimpleNamespace(latest=None)
        self.compiled_graphs = None
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
        self.busy_until = 0  # the step from which no save is running
        self.failure: Exception | None = None  # raised by the next step
        self._stop = False

    def accumulate(self, batch: list[Any]) -> Iterator[Any]:
        yield from batch

    def __call__(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": x.double().mean().float()}

    def backward(self, output: dict[str, Tensor], *, weight: float) -> None:
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
        self,
        directory: Path,
        *,
        extra: Any,
        config: Any,
        metrics: dict[str, float | None],
        retention: Retention,
        asynchronous: bool,
        when_busy: str,
    ) -> Path | None:
        assert (config, retention) == ({"c": 1}, RETENTION)
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

    def precision(self, findings: PrecisionFindings) -> None:
        self.events.append(f"precision {findings.step}")

    def close(self, exit_code: int) -> None:
        raise AssertionError("the trainer does not own its sinks")


def _train(
    engine: _CountingEngine,
    *,
    stop_at: int | None = None,
    saving: CheckpointConfig = SYNCHRONOUS,
    sink: _Sink | None = None,
    **config: int,
) -> tuple[TrainResult, _Sink]:
    stop, sink = _Stop(), sink or _Sink(engine.events)
    loader = BatchLoader(_Source(), 0, 2, _BATCH // 2, cursor=engine.data_cursor)
    if stop_at == 0:
        stop.wanted = True
    elif stop_at is not None:
        backward = engine.backward

        def interrupted(output: dict[str, Tensor], *, weight: float) -> None:
            stop.wanted = engine.attempted_steps + 1 >= stop_at
            backward(output, weight=weight)

        engine.backward = interrupted  # type: ignore[method-assign]
    trainer = Trainer(
        cast(Engine, engine),
        TrainingData(loader, lambda: validation_batches(_Source(), 2, 3), Language(50), 2, tokens_before=1000),
        TrainConfig(**config),
        SaveOptions(Path("checkpoints"), settings={"c": 1}, extra={"e": 1}, config=saving),
        stop=stop,
        sinks=[sink],
    )
    return trainer.run(), sink


def test_cadence() -> None:
    engine = _CountingEngine()
    result, sink = _train(engine, steps=7, log_every=3, eval_every=2, save_every=3)
    assert result.finished
    assert [m.step for m in sink.steps] == [3, 6, 7]
    assert engine.events == ["eval 2", "save 3", "eval 4", "eval 6", "save 6", "save 7", "eval 7", "wait"]
    assert engine.expected == [3, 6, 7]
    assert engine.cursors == [0, 4, 8, 12, 16, 20, 24]
    assert engine.saved_cursors == [12, 24, 28]  # the next sample, not the last one
    assert result.train_loss == 1 / 7


@pytest.mark.parametrize("every", [0, 4])
def test_end_is_evaluated_and_saved_once(every: int) -> None:
    engine = _CountingEngine()
    _train(engine, steps=4, log_every=1, eval_every=every, save_every=every)
    assert sorted(engine.events) == ["eval 4", "save 4", "wait"]


def test_save_at_end_false() -> None:
    engine = _CountingEngine()
    _train(engine, saving=replace(SYNCHRONOUS, save_at_end=False), steps=4, eval_every=0, save_every=3)
    assert engine.events == ["save 3", "eval 4", "wait"]
    assert engine.expected == [3]


# -- asynchronous saves ------------------------------------------------------------------------------------------------

ASYNCHRONOUS = replace(SYNCHRONOUS, asynchronous=True)


def test_last_evaluation_overlaps_last_save() -> None:
    engine = _CountingEngine()
    result, _ = _train(engine, saving=ASYNCHRONOUS, steps=5, eval_every=0, save_every=3)
    assert engine.events == ["prepare", "start 3", "start 5", "eval 5", "wait"]
    assert result.finished


def test_save_of_a_stop_is_committed_when_the_loop_returns() -> None:
    """The engine itself waits for the save before it."""
    engine = _CountingEngine()
    result, _ = _train(engine, stop_at=4, saving=ASYNCHRONOUS, steps=9, eval_every=0, save_every=3)
    assert engine.events == ["prepare", "start 3", "save 4"]
    assert not result.finished


@pytest.mark.parametrize("steps", [9, 8])
def test_a_busy_save_is_skipped(steps: int) -> None:
    """Except the last save, and the save of a stop."""
    engine = _CountingEngine()
    engine.busy_until = 100
    skipping = replace(ASYNCHRONOUS, when_busy="skip")
    _train(engine, saving=skipping, steps=steps, eval_every=0, save_every=3)
    assert engine.events == ["prepare", f"start {steps}", f"eval {steps}", "wait"]
    stopped = _CountingEngine()
    stopped.busy_until = 100
    _train(stopped, stop_at=6, saving=skipping, steps=steps, eval_every=0, save_every=3)
    assert stopped.events == ["prepare", "save 6"]


def test_a_checkpoint_has_the_losses_of_its_own_step() -> None:
    engine = _CountingEngine(skip=(6,))
    _train(engine, steps=6, eval_every=4, save_every=2)
    loss = 24.5  # of all samples
    assert [metrics["train_loss"] for metrics in engine.metrics] == [1 / 2, 1 / 4, 1 / 5]  # the last applied step's
    assert [metrics["val_loss"] for metrics in engine.metrics] == [None, pytest.approx(loss, abs=25), None]


def test_keep_best_evaluates_before_each_save() -> None:
    engine = _CountingEngine()
    saving = replace(ASYNCHRONOUS, keep_last=3, keep_every=7, keep_best=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.RETENTION", Retention(3, 7, 1))
        _train(engine, saving=saving, steps=5, eval_every=4, save_every=2)
        busy = _CountingEngine()
        busy.busy_until = 4
        _train(busy, saving=replace(saving, when_busy="skip"), steps=5, eval_every=0, save_every=2)
    assert engine.events == ["prepare", "eval 2", "start 2", "eval 4", "start 4", "eval 5", "start 5", "wait"]
    assert all(metrics["val_loss"] is not None for metrics in engine.metrics)
    assert busy.events == ["prepare", "eval 4", "start 4", "eval 5", "start 5", "wait"], (
        "no evaluation for a skipped save"
    )


_FAILURE = CheckpointError("saving step 3 failed on rank 1")


def _fails_in_step(engine: _CountingEngine, step: int, error: Exception = _FAILURE) -> None:
    """Makes the engine fail with ``error``, by default that of the running save, in the backward of ``step``."""
    backward = engine.backward

    def failing(output: dict[str, Tensor], *, weight: float) -> None:
        if engine.attempted_steps + 1 == step:
            engine.failure = error
        backward(output, weight=weight)

    engine.backward = failing  # type: ignore[method-assign]


@pytest.mark.parametrize("fails_at", [5, 6, 7])
def test_a_stop_is_saved_although_the_save_before_it_fails(fails_at: int) -> None:
    """The stop arrives in step 6: that step raises the failure, or its save, or nothing does before the end."""
    engine = _CountingEngine()
    if fails_at == 6:
        step = engine.step

        def failing() -> StepOutcome:
            outcome = step()
            if engine.attempted_steps == 6:
                engine.failure = _FAILURE
            return outcome

        engine.step = failing  # type: ignore[method-assign]
    else:
        _fails_in_step(engine, 6 if fails_at == 5 else 7)
    result, sink = _train(engine, stop_at=6, saving=ASYNCHRONOUS, steps=9, log_every=1, eval_every=0, save_every=3)
    assert engine.events == ["prepare", "start 3", "save 6"]
    assert [m.step for m in sink.steps] == [1, 2, 3, 4, 5, 6]
    assert not result.finished


@pytest.mark.parametrize("error", [_FAILURE, CorruptionError("step 4: the audit found changed bits")])
@pytest.mark.parametrize("is_synchronous", [True, False])
def test_a_failure_of_all_ranks_loses_no_line(error: Exception, is_synchronous: bool) -> None:
    engine, sink = _CountingEngine(skip=(4,), is_synchronous=is_synchronous), _Sink([])
    _fails_in_step(engine, 5, error)
    with pytest.raises(type(error)) as raised:
        _train(engine, sink=sink, saving=ASYNCHRONOUS, steps=9, log_every=3, eval_every=0, save_every=3)
    assert raised.value is error
    assert engine.events == ["prepare", "start 3", "leave"]
    assert [m.step for m in sink.steps] == [3, 4], "the last outcome of a lazy engine had not been read"


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (ValueError("the model broke"), "leave"),
        (RuntimeError("CUDA error: an illegal memory access"), "leave"),
        (CommunicationError("another rank has died"), "give up"),
        (RuntimeError("[../third_party/gloo/...] Connection closed by peer"), "give up"),
    ],
)
def test_a_failing_run_leaves_no_thread(error: Exception, event: str) -> None:
    engine = _CountingEngine()
    backward = engine.backward

    def broken(output: dict[str, Tensor], *, weight: float) -> None:
        if engine.attempted_steps == 4:
            raise error
        backward(output, weight=weight)

    engine.backward = broken  # type: ignore[method-assign]
    with pytest.raises(type(error)) as raised:
        _train(engine, saving=ASYNCHRONOUS, steps=9, eval_every=0, save_every=3)
    assert raised.value is error
    assert engine.events == ["prepare", "start 3", event]


# -- batches ------------------------------------------------------------------------------------------------------


class _CopiedTensor:
    """A tensor that tells how it is copied."""

    def __init__(self, device: str, pinned: bool = False) -> None:
        self.device = torch.device(device)
        self.pinned = pinned

    def pin_memory(self) -> _CopiedTensor:
        assert self.device.type == "cpu", "torch pins tensors of the CPU only"
        return _CopiedTensor("cpu", pinned=True)

    def to(self, device: torch.device, *, non_blocking: bool) -> tuple[bool, bool]:
        return self.pinned, non_blocking


def test_a_batch_goes_to_a_gpu_from_pinned_memory() -> None:
    batch: dict[str, Any] = {"tokens": _CopiedTensor("cpu"), "resident": _CopiedTensor("cuda:0")}
    assert to_device(batch, torch.device("cuda", 0)) == {"tokens": (True, True), "resident": (False, True)}
    assert to_device({"tokens": batch["tokens"]}, torch.device("cpu")) == {"tokens": (False, True)}


# -- reports ------------------------------------------------------------------------------------------------------


def test_every_skip_is_logged_with_its_culprit() -> None:
    engine = _CountingEngine(skip=(2, 5))
    result, sink = _train(engine, steps=6, log_every=6, eval_every=0, save_every=0)
    assert [(m.step, m.applied, m.skipped_steps, m.tokens) for m in sink.steps] == [
        (2, False, 1, 1004),
        (5, False, 2, 1012),
        (6, True, 2, 1016),
    ]
    assert sink.steps[0].reason == "overflow"
    assert sink.steps[0].culprit == "reduced gradient of 'head'[2:5] not finite (3 NaN); owner of the shard: rank 1"
    assert sink.steps[0].evidence is not None
    assert (sink.steps[0].evidence["start"], sink.steps[0].evidence["num_nan"]) == (2, 3)
    assert sink.steps[2].culprit is None
    assert result.train_loss == 1 / 6
    assert result.tokens == 1016


_CADENCE = {"steps": 11, "log_every": 4, "eval_every": 6, "save_every": 9}


def test_reports_do_not_synchronize_the_device() -> None:
    eager, late = _CountingEngine(skip=(2, 7)), _CountingEngine(skip=(2, 7), is_synchronous=False)
    (want, eager_sink), (got, late_sink) = _train(eager, **_CADENCE), _train(late, **_CADENCE)
    due = {4, 6, 8, 9, 11}  # a log line, an evaluation or a save is due
    assert {step for step, _ in late.reads} == set(range(1, 12))
    assert set(late.reads) == {(step, step if step in due else step + 1) for step in range(1, 12)}

    def lines(sink: _Sink) -> list[tuple[Any, ...]]:
        return [(m.step, m.loss, m.applied, m.skipped_steps, m.tokens, m.reason, m.culprit) for m in sink.steps]

    assert repr(lines(late_sink)) == repr(lines(eager_sink))
    assert [line[0] for line in lines(late_sink)] == [2, 4, 7, 8, 11]
    assert late.events == eager.events
    assert (got.train_loss, got.tokens, got.finished) == (want.train_loss, want.tokens, want.finished)


@pytest.mark.parametrize(("stop_at", "last"), [(1, 2), (3, 4), (4, 4), (7, 8)])
def test_a_stop_is_noticed_by_the_next_step(stop_at: int, last: int) -> None:
    engine = _CountingEngine(is_synchronous=False)
    result, _ = _train(engine, stop_at=stop_at, steps=9, log_every=4, eval_every=0, save_every=0)
    assert not result.finished
    assert result.tokens == 1000 + _BATCH * last
    assert engine.attempted_steps == last
    assert engine.events == [f"save {last}"]


@pytest.mark.parametrize("where", ["step", "read", "next backward"])
def test_the_skip_that_ends_the_run_is_reported_once(where: str) -> None:
    """The step raises the error, or the first read of its outcome, or a later call."""
    engine, sink = _CountingEngine(skip=(2, 3), is_synchronous=where == "step"), _Sink([])
    step, backward = engine.step, engine.backward
    last: list[StepOutcome] = []

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

    def ending_backward(output: dict[str, Tensor], *, weight: float) -> None:
        backward(output, weight=weight)
        if engine.attempted_steps == 3:
            end()

    engine.step, engine.backward = ending_step, ending_backward  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError, match="2 steps in a row"):
        _train(engine, sink=sink, steps=9, log_every=3 if where == "read" else 100, eval_every=0, save_every=0)
    assert [(m.step, m.reason, m.skipped_steps) for m in sink.steps] == [(2, "overflow", 1), (3, "overflow", 2)]


def test_train_loss_is_that_of_the_last_applied_step() -> None:
    result, _ = _train(_CountingEngine(skip=(3,)), steps=3, eval_every=0, save_every=0)
    assert result.train_loss == 1 / 2


@pytest.mark.parametrize(("stop_at", "last"), [(0, 1), (1, 1), (3, 3)])
def test_a_stop_ends_the_step_and_saves_it(stop_at: int, last: int) -> None:
    engine = _CountingEngine()
    result, sink = _train(engine, stop_at=stop_at, steps=9, log_every=100, eval_every=0, save_every=0)
    assert not result.finished
    assert engine.attempted_steps == last
    assert engine.events == [f"save {last}"]
    assert [m.step for m in sink.steps] == [last]


def test_a_stop_in_the_last_step_finishes_the_run() -> None:
    engine = _CountingEngine()
    result, _ = _train(engine, stop_at=4, steps=4, eval_every=0, save_every=0)
    assert result.finished
    assert engine.events == ["save 4", "eval 4", "wait"]


def test_a_run_continues_where_it_was_loaded() -> None:
    engine = _CountingEngine(attempted_steps=5)
    _train(engine, steps=7, eval_every=0, save_every=5)
    assert engine.cursors == [20, 24]
    assert engine.events == ["save 7", "eval 7", "wait"]


def test_a_run_with_no_steps_left_only_evaluates() -> None:
    engine = _CountingEngine(attempted_steps=9)
    result, sink = _train(engine, steps=7, eval_every=1, save_every=1)
    assert engine.events == ["eval 9", "wait"]
    assert sink.steps == []
    assert (result.finished, result.train_loss, result.timing.steps) == (True, None, 0)


@settings(max_examples=25)
@given(
    steps=st.integers(1, 12), cut=st.integers(1, 12), eval_every=st.integers(0, 5), save_every=st.integers(0, 5),
    log_every=st.integers(1, 5),
)  # fmt: skip
def test_stop_and_resume_change_no_data_and_no_evaluation(
    steps: int, cut: int, eval_every: int, save_every: int, log_every: int
) -> None:
    config = {"steps": steps, "eval_every": eval_every, "save_every": save_every, "log_every": log_every}
    whole = _CountingEngine()
    _train(whole, **config)
    first = _CountingEngine()
    _train(first, stop_at=min(cut, steps), **config)
    second = _CountingEngine(attempted_steps=first.attempted_steps)
    _train(second, **config)
    assert first.cursors + second.cursors == whole.cursors

    def evaluated(events: list[str]) -> set[str]:
        return {event for event in events if event.startswith("eval") and event != f"eval {first.attempted_steps}"}

    assert evaluated(first.events) | evaluated(second.events) == evaluated(whole.events)


_NUM_BATCHES = (1, 5, 100)


def _validate(rank: int, world: int) -> list[float]:
    import torch.distributed as dist

    comm = make_communicator(dist.group.WORLD if world > 1 else None, torch.device("cpu"))
    engine = cast(Engine, _CountingEngine(comm=comm))
    task = Language(50)
    return [validate(engine, task, validation_batches(_Source(), 7, num, rank, world))["loss"] for num in _NUM_BATCHES]


@pytest.mark.processes
def test_validation_loss_has_the_same_bits_at_any_world_size() -> None:
    losses = [loss for world in (1, 2, 3) for loss in run_ranks(world, _validate)]
    assert losses == losses[:1] * 6
    assert losses[0][-1] == pytest.approx(49 / 2)  # all 50 samples, each once


def test_a_model_without_a_loss_is_named() -> None:
    engine = _CountingEngine()
    engine.__class__ = type("Lossless", (_CountingEngine,), {"__call__": lambda self, x, targets: {"logits": x}})
    with pytest.raises(ModelError, match=r"must return its loss .*got a dict"):
        validate(cast(Engine, engine), Language(50), validation_batches(_Source(), 2, 1))
