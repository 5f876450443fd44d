"""The training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dtrain.checkpoint import Retention
from dtrain.config.schema import CheckpointConfig
from dtrain.data import PrefetchedBatches
from dtrain.device import peak_memory
from dtrain.distributed.consensus import on_every_rank
from dtrain.distributed.logging import logger
from dtrain.distributed.rank_liveness import is_lost_connection
from dtrain.engine.outcome import StepOutcome
from dtrain.errors import CheckpointError, CorruptionError, NonFiniteError
from dtrain.telemetry.metrics import Sink, StepMetrics
from dtrain.telemetry.throughput import PhaseTimes, StepTimer, StepTiming
from dtrain.train.adapters import AdapterCheck
from dtrain.train.garbage import GarbageCollection
from dtrain.train.sampling import PrecisionSampling
from dtrain.train.session import Session, StepWatch
from dtrain.train.signals import StopSignals

TOKENS = "tokens"
"""Key in a checkpoint's extra: tokens of the applied steps, whose batch sizes may have differed."""

Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class SaveOptions:
    """Directory and options of checkpoints, and what they hold beside the engine's state."""

    directory: Path
    settings: dict[str, Any]  # the resolved config
    extra: dict[str, Any]
    config: CheckpointConfig


@dataclass(frozen=True)
class TrainResult:
    """Result of ``Trainer.run``: finished its steps, or stopped by a signal after saving."""

    finished: bool
    tokens: int  # that counted in the loss of all applied steps, including those before a resume
    train_loss: float | None
    val_losses: Mapping[str, float]  # and metrics of the last validation
    timing: StepTiming  # of this run's steps without the first, which compiles


class Trainer:
    """Trains ``session`` up to the attempted step ``switch_step`` of its configuration, and saves there.

    Args:
        session: the loop starts at the ``attempted_steps`` of its engine.
        saving: of checkpoints.
        stop: signals that end the loop.
        sinks: receivers of metrics; empty on ranks other than 0.
        tokens_before: targets that counted in the loss of the steps before.
    """

    def __init__(
        self,
        session: Session,
        saving: SaveOptions,
        *,
        stop: StopSignals,
        sinks: Sequence[Sink] = (),
        tokens_before: int = 0,
    ) -> None:
        config, engine = session.config, session.engine
        self._session = session
        self._engine = engine
        self._config = config.train
        self._end = config.switch_step
        self._growth = config.batch_growth
        self._unit = session.dataset.task.unit
        self._num_targets = config.train.micro_batch_size * config.targets_per_sample
        self._saving = saving
        self._stop = stop
        self._sinks = sinks
        self._requests = _Requests(self._request)
        self._sampling = PrecisionSampling(engine, config.telemetry, sinks)
        self._adapters = AdapterCheck(engine)
        self._tokens = tokens_before
        self._train_loss: float | None = None
        self._validated: tuple[int, Mapping[str, float]] = (-1, {})  # step and losses
        self._skipped_steps = engine.attempted_steps - engine.applied_steps
        self._unreported: list[tuple[int, StepOutcome]] = []
        self._waited_s = 0.0  # for the batches of the steps since the last report
        self._saved_step = engine.attempted_steps  # a loaded step needs no second checkpoint

    def run(self) -> TrainResult:
        self._timer = StepTimer()  # starts now, not when the trainer was built
        self._phases = PhaseTimes(self._engine.comm)
        session = self._session
        self._batches = PrefetchedBatches(session.loader, session.config.data.prefetch, self._engine.device)
        try:
            with GarbageCollection(self._config.collect_garbage_every) as garbage:
                return self._run(garbage)
        except BaseException as error:
            # the running save holds a good state, so it may still commit
            self._engine.leave_save(cancel=is_lost_connection(error))
            if isinstance(error, NonFiniteError | CheckpointError | CorruptionError):  # all ranks raise it
                self._report_last(error)
            raise
        finally:
            self._batches.close()

    def _run(self, garbage: GarbageCollection) -> TrainResult:
        config, engine = self._config, self._engine
        if self._saving.config.asynchronous:
            engine.prepare_saves()
        while engine.attempted_steps < self._end:
            stop = self._report_ready(self._step())
            step = engine.attempted_steps
            if stop and step < config.steps:
                self._save(step, asynchronous=False, when_busy="wait")
                return self._result(finished=False)
            if evaluates := _due(step, config.eval_every):
                self._evaluate(step)
            if saves := _due(step, config.save_every):
                self._save_with_validation(step, when_busy=self._saving.config.when_busy)
            with self._timer.paused():  # the first one takes as long as many steps
                garbage.after_step(step, at_pause=evaluates or saves)
        # save before the last evaluation, whose failure then loses no training
        step = engine.attempted_steps
        if self._saving.config.save_at_end or self._end < config.steps:
            self._save_with_validation(step, when_busy="wait")
        self._evaluate(step)
        engine.wait_for_save()
        return self._result(finished=True)

    def _step(self) -> StepOutcome:
        engine = self._engine
        batch = next(self._batches)
        self._waited_s += self._batches.waited_s
        step = partial(self._session.step, batch, self._sampling.around_step(), watch=self._requests)
        outcome = self._retry_if_stopping(step, step if self._session.config.engine.graph else engine.step)
        self._adapters.after(outcome)
        engine.data_cursor = self._batches.cursor
        return outcome

    def _request(self) -> None:
        """Tells the engine, before it completes a step, what the ranks shall agree on."""
        if self._stop.requested:
            self._engine.request_stop()
        if self._will_save(self._engine.attempted_steps + 1):
            self._engine.expect_save()

    def _will_save(self, step: int) -> bool:
        """Whether the state after ``step`` steps is saved; a stop by a signal is known to the engine."""
        config = self._config
        saves_at_end = self._saving.config.save_at_end or self._end < config.steps
        return _due(step, config.save_every) or (step == self._end and saves_at_end)

    def _retry_if_stopping(self, action: Callable[[], Outcome], again: Callable[[], Outcome]) -> Outcome:
        """Calls ``action``, then ``again`` if it raises the failure of an earlier save while any rank wants to stop.

        The failed save is then abandoned, and the run continues to the save that a stop requires.
        """
        try:
            return action()
        except CheckpointError as error:  # all ranks raise it, so all enter the collective
            wanted = on_every_rank(self._engine.comm, "", lambda: self._stop.requested, CheckpointError)
            if not any(wanted):
                raise
            logger.warning(
                "a save failed, but a stop is requested, so the run continues to the save of the stop: %s", error
            )
            self._engine.request_stop()
            return again()

    def _report_ready(self, outcome: StepOutcome) -> bool:
        """Reports the steps whose outcome can be read without synchronizing; returns whether a rank requests a stop.

        On a GPU these are the steps before this one, unless a log line, validation or save is due.
        """
        config, step = self._config, self._engine.attempted_steps
        self._unreported.append((step, outcome))
        shadow_every = self._session.config.precision.float8.shadow_every  # after which the host has waited
        intervals = (config.log_every, config.eval_every, config.save_every, shadow_every)
        due = self._engine.is_synchronous or step == self._end or any(_due(step, every) for every in intervals)
        ready = self._unreported if due else self._unreported[:-1]
        stop = any(reported.stop_requested for _, reported in ready)
        if stop:  # the save that follows counts the tokens of all steps
            ready = self._unreported
        self._unreported = self._unreported[len(ready) :]
        for number, reported in ready:
            self._report(number, reported)
        return stop

    def _report(self, step: int, outcome: StepOutcome) -> None:
        culprit = outcome.culprit  # read first, because it may end the run; on every rank, because they search together
        tokens = self._tokens_of(outcome)
        if outcome.applied:
            self._train_loss = outcome.loss
            self._tokens += tokens
        else:
            self._skipped_steps += 1
        self._timer.step_done(tokens, self._waited_s)  # after the outcome is read, which waits for the device
        self._waited_s = 0.0
        last = step == self._end or outcome.stop_requested
        gap = self._engine.float8_gap
        gap = gap if gap is not None and gap.step == step else None
        if outcome.applied and not last and step % self._config.log_every and gap is None:
            return
        pace = self._timer.window()
        phases = self._phases.window(pace.steps)
        busy = self._engine.busy.latest
        sizes = self._growth.at(step - 1)
        metrics = StepMetrics(
            step=step,
            loss=outcome.loss,
            lr=outcome.lr,
            grad_norm=outcome.grad_norm,
            loss_scale=outcome.loss_scale,
            applied=outcome.applied,
            format=self._engine.policy.name,
            skipped_steps=self._skipped_steps,
            tokens=self._tokens,
            global_batch_size=sizes.global_batch_size,
            seq_len=sizes.seq_len if self._unit == "tokens" else None,
            tokens_per_s=pace.tokens_per_s,
            step_ms=1000 * pace.step_s,
            data_wait_ms=pace.data_wait_ms,
            peak_memory=peak_memory(self._engine.device),
            reason=outcome.reason,
            culprit=str(culprit) if culprit is not None else None,
            evidence=asdict(culprit) if culprit is not None else None,
            **phases,
            slowest_rank=busy.slowest_rank if busy is not None else None,
            busy_slowest_ms=busy.slowest_ms if busy is not None else None,
            busy_median_ms=busy.median_ms if busy is not None else None,
            busy_spread_ms=busy.spread_ms if busy is not None else None,
            compiled_graphs=self._engine.compiled_graphs,
            float8_loss_gap=gap.loss if gap is not None else None,
            float8_gradient_cosine=gap.cosine if gap is not None else None,
            float8_gradient_norm_ratio=gap.norm_ratio if gap is not None else None,
        )
        for sink in self._sinks:
            sink.step(metrics)

    def _tokens_of(self, outcome: StepOutcome) -> int:
        """Returns the targets of a step that counted in the loss, over all ranks."""
        weight = outcome.weight
        return round(weight * self._num_targets) if math.isfinite(weight) else 0

    def _report_last(self, error: NonFiniteError | CheckpointError | CorruptionError) -> None:
        """Reports the remaining steps, among them the skip that ends the run."""
        outcome = error.outcome if isinstance(error, NonFiniteError) else None
        last = [(self._engine.attempted_steps, outcome)] if isinstance(outcome, StepOutcome) else []
        for step, outcome in self._unreported or last:
            self._report(step, outcome)

    def _evaluate(self, step: int) -> None:
        if self._validated[0] == step:
            return
        with self._timer.paused():
            losses = self._measure("")
            if self._engine.ema_decay is not None:
                with self._engine.ema():
                    losses |= self._measure("_ema")
        self._validated = (step, losses)
        for sink in self._sinks:
            sink.validation(step, losses)

    def _measure(self, suffix: str) -> dict[str, float]:
        return {f"val_{name}{suffix}": value for name, value in self._session.validate().items()}

    def _save_with_validation(self, step: int, *, when_busy: str) -> None:
        """Saves, after a validation if ``keep_best`` needs the loss of this step."""
        if self._saving.config.keep_best and self._saved_step != step:
            if when_busy == "skip" and self._engine.is_saving():
                return  # before the cost of a validation
            self._evaluate(step)
        self._save(step, asynchronous=self._saving.config.asynchronous, when_busy=when_busy)

    def _save(self, step: int, *, asynchronous: bool, when_busy: str) -> None:
        if self._saved_step == step:
            return
        saving, config = self._saving, self._saving.config
        losses = self._validated[1] if self._validated[0] == step else {}
        save = partial(
            self._engine.save,
            saving.directory,
            extra={**saving.extra, TOKENS: self._tokens},
            config=saving.settings,
            metrics={"train_loss": self._train_loss, "val_loss": None, **losses},
            retention=Retention(config.keep_last, config.keep_every, config.keep_best),
            asynchronous=asynchronous,
            when_busy=when_busy,
        )
        with self._timer.paused():
            path = self._retry_if_stopping(save, save)
        if path is not None:
            self._saved_step = step

    def _result(self, *, finished: bool) -> TrainResult:
        return TrainResult(
            finished=finished,
            tokens=self._tokens,
            train_loss=self._train_loss,
            val_losses=self._validated[1],
            timing=self._timer.total(),
        )


class _Requests(StepWatch):
    """Calls ``request`` before the engine completes a step."""

    def __init__(self, request: Callable[[], None]) -> None:
        self._request = request

    def update(self) -> AbstractContextManager[object]:
        self._request()
        return super().update()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
