"""The phases of a step, which a watcher of this rank reads."""

from __future__ import annotations

from dtrain.distributed.progress import Phase, Progress
from dtrain.engine.parts.part import Forward, StepPart, StepUnderWay


class Phases(StepPart):
    """Records the phase of this rank in ``progress``."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def before_forward(self, call: Forward) -> None:
        self._progress.begin(Phase.EVALUATION if call.is_evaluating else Phase.FORWARD, call.step)

    def before_backward(self) -> None:
        self._progress.begin(Phase.BACKWARD)

    def after_backward(self) -> None:
        self._progress.begin(Phase.DATA)

    def before_reduction(self, step: StepUnderWay) -> None:
        self._progress.begin(Phase.UPDATE)

    def end_step(self, step: StepUnderWay) -> None:
        if step.outcome is not None:
            self._progress.end_step(step.number + 1)
