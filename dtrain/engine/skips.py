"""Skipped steps in a row: when to stop, and what to say."""

from __future__ import annotations

from collections import Counter

from dtrain.engine.base import StepOutcome
from dtrain.errors import NonFiniteError

_ADVICE = {
    "nonfinite_loss": "The loss itself is not finite: look at that batch, or lower the learning rate",
    "overflow": "The loss is finite and gradients are not: keep the module at fault in FP32, or use BF16",
    "empty": "The weights of all micro-batches were 0: look at the data",
}


class SkipCounter:
    """Counts skipped steps since the last applied one.

    Args:
        limit: so many in a row end the run.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._skips: list[StepOutcome] = []

    def reset(self) -> None:
        """Forgets what came before a load."""
        self._skips.clear()

    def count(self, outcome: StepOutcome, *, loss_scale: float) -> None:
        """Notes how a step ended.

        Args:
            outcome: of the step.
            loss_scale: in force after it.

        Raises:
            NonFiniteError: the limit is reached; carries the diagnosis.
        """
        if outcome.applied:
            self.reset()
            return
        self._skips.append(outcome)
        if len(self._skips) < self._limit:
            return
        reasons = Counter(skip.reason or "" for skip in self._skips)
        counts = ", ".join(f"{number} x {reason}" for reason, number in sorted(reasons.items()))
        raise NonFiniteError(
            f"{len(self._skips)} steps in a row were skipped ({counts}); loss scale {self._skips[0].loss_scale:g} -> "
            f"{loss_scale:g}; last culprit: {outcome.culprit or 'none'}. {_ADVICE[outcome.reason or 'empty']}"
        )
