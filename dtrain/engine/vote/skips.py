"""Counts skipped steps in a row; too many end the run, with a diagnosis of the cause."""

from __future__ import annotations

from collections import Counter, deque

from dtrain.engine.outcome import StepOutcome
from dtrain.engine.vote.decide import DecodedDecision
from dtrain.errors import NonFiniteError
from dtrain.precision.loss_scale import LossScaleState

_WINDOW = 20  # applied steps that the diagnosis compares
_LOSS_RISE = 3.0  # times the least loss of the window; training does not recover from that
_NORM_RISE = 100.0  # likewise, of the gradient norm

_DIVERGED = "Diverged model: {sign}; go back to an earlier checkpoint and lower the learning rate"
_RISES = "the last applied steps had a fast rising loss or gradient norm"


class SkipCounter:
    """Counts skipped steps since the last applied one.

    Args:
        limit: number of skipped steps in a row that ends the run.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._applied: deque[StepOutcome] = deque(maxlen=_WINDOW)
        self._forget_skips()

    def _forget_skips(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._first_scale = 0.0  # loss scale of the first skipped step
        # of the steps that were skipped for a loss, on all ranks
        self._num_bad_losses = self._num_micro_batches = 0
        self._bad_ranks: set[int] = set()

    def reset(self) -> None:
        self._forget_skips()
        self._applied.clear()

    def applied(self, outcome: StepOutcome) -> None:
        self._forget_skips()
        self._applied.append(outcome)

    def skipped(self, outcome: StepOutcome, decision: DecodedDecision, scale: LossScaleState) -> None:
        """Records a skipped step.

        Args:
            outcome: of the step.
            decision: on the step.
            scale: the loss scale after it.

        Raises:
            NonFiniteError: the limit is reached; carries the diagnosis.
        """
        if not self._reasons:
            self._first_scale = outcome.loss_scale
        self._reasons[decision.reason or ""] += 1
        if decision.reason == "nonfinite_loss":
            self._num_bad_losses += decision.num_bad_losses
            self._num_micro_batches += sum(host.num_micro_batches for host in decision.hosts)
            self._bad_ranks.update(rank for rank, device in enumerate(decision.devices) if device.num_bad_losses)
        if self._reasons.total() < self._limit:
            return
        counts = ", ".join(f"{number} x {reason}" for reason, number in sorted(self._reasons.items()))
        raise NonFiniteError(
            f"{self._reasons.total()} steps in a row were skipped ({counts}); loss scale {self._first_scale:g} -> "
            f"{scale.scale:g}; last culprit: {outcome.culprit or 'none'}. {self.diagnose(scale)}",
            outcome,
        )

    def diagnose(self, scale: LossScaleState) -> str:
        """Returns the likely cause: empty batches, bad data, a diverged model, the scale, or one operation's gradient.

        Args:
            scale: the loss scale after the skipped steps.
        """
        # the most frequent one: a single step of another kind is not the cause
        reason, _ = self._reasons.most_common(1)[0]
        if reason == "empty":
            return "Empty batches: the weights of all micro-batches were 0; look at the data"
        if reason == "nonfinite_loss" and self._num_bad_losses == self._num_micro_batches:
            return _DIVERGED.format(sign="every loss of every rank is not finite")
        if self._has_diverged():
            return _DIVERGED.format(sign=_RISES)
        if reason == "nonfinite_loss":
            ranks = sorted(self._bad_ranks)
            return (
                f"Bad batches: {self._num_bad_losses} of {self._num_micro_batches} losses are not finite, all on "
                f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}, while others of the same steps "
                f"are; look at the samples of the culprits"
            )
        rule = scale.rule
        if rule.mode == "static":
            return (
                f"Wrong loss scale: the losses are finite, their gradients times the static scale {scale.scale:g} are "
                f"not; lower it, or use loss_scale=dynamic"
            )
        if rule.mode in ("dynamic", "calibrated") and scale.scale > rule.min:
            return (
                f"Wrong loss scale: gradients still overflow at {scale.scale:g} on its way down; start lower "
                f"(loss_scale.init), or allow more skips (max_consecutive_skips)"
            )
        return (
            "One operation's gradient: the losses are finite and gradients are not, at any loss scale. Look at the "
            "module of the culprit for a root, logarithm or quotient at 0, and keep it in FP32 (precision.rules)"
        )

    def _has_diverged(self) -> bool:
        applied = self._applied
        if len(applied) < 2:
            return False
        last = applied[-1]
        return last.loss > _LOSS_RISE * min(abs(outcome.loss) for outcome in applied) or (
            last.grad_norm > _NORM_RISE * min(outcome.grad_norm for outcome in applied)
        )
