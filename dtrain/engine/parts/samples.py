"""The part that measures what a step loses to precision, when asked to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dtrain.engine.measurement.sample import PrecisionSample
from dtrain.engine.micro_batch import MicroBatches
from dtrain.engine.parts.part import StepPart, StepUnderWay
from dtrain.engine.run_state import RunState
from dtrain.engine.vote.finalize import StepFinalizer
from dtrain.errors import UsageError
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.parameters.model_states import ModelStates


class PrecisionSamples(StepPart):
    """Measures one step after the other, each inside ``measured``; other steps pay nothing.

    Args:
        states: of the model.
        run: its attempted steps.
        batch: the step under way.
        finalizer: holds the loss scale.
        backward_names, monitor: as of ``PrecisionSample``.
    """

    def __init__(
        self,
        states: ModelStates,
        run: RunState,
        batch: MicroBatches,
        finalizer: StepFinalizer,
        backward_names: Sequence[str],
        monitor: GradientMonitor,
    ) -> None:
        self._states = states
        self._run = run
        self._batch = batch
        self._finalizer = finalizer
        self._names = backward_names
        self._monitor = monitor
        self._current: PrecisionSample | None = None

    @property
    def is_measuring(self) -> bool:
        return self._current is not None

    @contextmanager
    def measured(self, activations: Sequence[str]) -> Iterator[PrecisionSample]:
        """Context of a step; see ``dtrain.engine.loop.TrainingLoop.measure_precision``."""
        if self._current is not None:
            raise UsageError("engine.measure_precision inside itself; one context measures one step")
        self._finalizer.finalize_step()
        self._current = sample = PrecisionSample(
            self._states,
            activations,
            backward_names=self._names,
            monitor=self._monitor,
            scale=self._finalizer.scale,
            step=self._run.attempted_steps + 1,
            finalize=self._finalizer.finalize_step,
        )
        try:
            with sample.hooks():
                yield sample
            if self._batch.has_backward:
                raise UsageError("engine.measure_precision ended between backward and step; it measures a whole step")
        finally:
            self._current = None

    def before_backward(self) -> None:
        if self._current is not None:
            self._current.require_single_step()
            self._monitor.count_magnitudes(self._states.comm.device)

    def before_update(self, step: StepUnderWay) -> None:
        if self._current is not None:
            self._current.begin_update()

    def after_update(self, step: StepUnderWay) -> None:
        if self._current is not None:
            self._current.end_update()

    def end_step(self, step: StepUnderWay) -> None:
        if self._current is not None:
            self._current.outcome = step.outcome
