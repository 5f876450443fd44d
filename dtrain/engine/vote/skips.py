"""Counts skipped steps in a row, ends the run at a limit, and diagnoses the cause."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from dtrain.engine.interface import StepOutcome
from dtrain.engine.vote.decide import DecodedDecision
from dtrain.errors import NonFiniteError
from dtrain.precision.loss_scale import LossScaleState

_WINDOW = 20  # applied steps that the diagnosis compares
_LOSS_RISE = 3.0  # times the least loss of the window; training does not recover from that
_NORM_RISE = 100.0  # likewise, of the gradient norm


@dataclass(frozen=True)
class Skip:
    """The facts of a skipped step that the diagnosis needs.

    Attributes:
        bad_ranks: ranks with a loss that was not finite.
        num_bad_losses: micro-batches with such a loss, on all ranks.
        num_micro_batches: micro-batches on all ranks.
    """

    outcome: StepOutcome
    bad_ranks: tuple[int, ...]
    num_bad_losses: int
    num_micro_batches: int

    @staticmethod
    def of(outcome: StepOutcome, decision: DecodedDecision) -> Skip:
        records = decision.records
        return Skip(
            outcome,
            tuple(rank for rank, record in enumerate(records) if record.num_bad_losses),
            sum(record.num_bad_losses for record in records),
            sum(record.num_micro_batches for record in records),
        )


class SkipCounter:
    """Counts skipped steps since the last applied one.

    Args:
        limit: number of skipped steps in a row that ends the run.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._skips: list[Skip] = []
        self._applied: deque[StepOutcome] = deque(maxlen=_WINDOW)

    def reset(self) -> None:
        self._skips.clear()
        self._applied.clear()

    def applied(self, outcome: StepOutcome) -> None:
        self._skips.clear()
        self._applied.append(outcome)

    def skipped(self, skip: Skip, scale: LossScaleState) -> None:
        """Records a skipped step.

        Args:
            skip: its facts.
            scale: the loss scale after it.

        Raises:
            NonFiniteError: the limit is reached; carries the diagnosis.
        """
        self._skips.append(skip)
        if len(self._skips) < self._limit:
            return
        reasons = Counter(entry.outcome.reason or "" for entry in self._skips)
        counts = ", ".join(f"{number} x {reason}" for reason, number in sorted(reasons.items()))
        last = skip.outcome.culprit
        raise NonFiniteError(
            f"{len(self._skips)} steps in a row were skipped ({counts}); loss scale "
            f"{self._skips[0].outcome.loss_scale:g} -> {scale.scale:g}; last culprit: {last or 'none'}. "
            f"{diagnose(self._skips, list(self._applied), scale)}",
            skip.outcome,
        )


def diagnose(skips: list[Skip], applied: list[StepOutcome], scale: LossScaleState) -> str:
    """Returns the likely cause: empty batches, bad data, a diverged model, the loss scale, or one operation's gradient.

    Args:
        skips: all since the last applied step.
        applied: the last applied steps before them.
        scale: the loss scale after them.
    """
    # the most frequent one: a single step of another kind is not the cause
    reason, _ = Counter(skip.outcome.reason for skip in skips).most_common(1)[0]
    if reason == "empty":
        return "Empty batches: the weights of all micro-batches were 0; look at the data"
    if reason == "nonfinite_loss":
        return _diagnose_losses([skip for skip in skips if skip.outcome.reason == reason], applied)
    if _has_diverged(applied):
        return _DIVERGED.format(sign="the last applied steps had a fast rising loss or gradient norm")
    rule = scale.rule
    if rule.mode == "static":
        return (
            f"Wrong loss scale: the losses are finite, their gradients times the static scale {scale.scale:g} are not; "
            f"lower it, or use loss_scale=dynamic"
        )
    if rule.mode in ("dynamic", "calibrated") and scale.scale > rule.min:
        return (
            f"Wrong loss scale: gradients still overflow at {scale.scale:g} on its way down; start lower "
            f"(loss_scale.init), or allow more skips (max_consecutive_skips)"
        )
    return (
        "One operation's gradient: the losses are finite and gradients are not, at any loss scale. Look at the module "
        "of the culprit for a root, logarithm or quotient at 0, and keep it in FP32 (precision.rules)"
    )


_DIVERGED = "Diverged model: {sign}; go back to an earlier checkpoint and lower the learning rate"


def _diagnose_losses(skips: list[Skip], applied: list[StepOutcome]) -> str:
    if all(skip.num_bad_losses == skip.num_micro_batches for skip in skips):
        return _DIVERGED.format(sign="every loss of every rank is not finite")
    if _has_diverged(applied):
        return _DIVERGED.format(sign="the last applied steps had a fast rising loss or gradient norm")
    ranks = sorted({rank for skip in skips for rank in skip.bad_ranks})
    bad, total = sum(skip.num_bad_losses for skip in skips), sum(skip.num_micro_batches for skip in skips)
    return (
        f"Bad batches: {bad} of {total} losses are not finite, all on rank{'s' if len(ranks) > 1 else ''} "
        f"{', '.join(map(str, ranks))}, while others of the same steps are; look at the samples of the culprits"
    )


def _has_diverged(applied: list[StepOutcome]) -> bool:
    if len(applied) < 2:
        return False
    last = applied[-1]
    return last.loss > _LOSS_RISE * min(abs(outcome.loss) for outcome in applied) or (
        last.grad_norm > _NORM_RISE * min(outcome.grad_norm for outcome in applied)
    )
