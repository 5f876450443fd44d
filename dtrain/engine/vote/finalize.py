"""Reads decisions on the host and acts on them: outcome, culprit, loss scale, applied steps, skips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from torch import Tensor

from dtrain.distributed.communicator import Communicator
from dtrain.distributed.logging import logger
from dtrain.engine.interface import Culprit, LazyOutcome, StepOutcome
from dtrain.engine.vote.culprit import Finding, gather_findings, locate_bad_gradient, locate_bad_loss
from dtrain.engine.vote.decide import DecodedDecision
from dtrain.engine.vote.divergence import explain
from dtrain.engine.vote.readback import Readback
from dtrain.engine.vote.record import VoteRecord
from dtrain.engine.vote.skips import Skip, SkipCounter
from dtrain.errors import DivergenceError, UsageError
from dtrain.precision.loss_scale import LossScaleState


@dataclass
class _PostedStep:
    """A step whose decision is on its way from the device to the host."""

    read: Callable[[], list[int]]
    known: VoteRecord  # this rank's; only the host's fields are filled
    collectives: tuple[str, ...]  # that this rank issued in the step
    outcome: StepOutcome | None = None
    divergence: DivergenceError | None = None

    def peek(self) -> DecodedDecision:
        return DecodedDecision.unpack(self.read())


@dataclass(frozen=True)
class CulpritSearch:
    """The collaborators of a search for the gradient that is not finite.

    Attributes:
        find_nonfinite: searches this rank's main grads as they are now.
        clear: drops the recorded gradients of the step.
        backward_names: the names of all parameters in the order in which backward reaches them.
    """

    find_nonfinite: Callable[[], Sequence[Finding]]
    clear: Callable[[], None]
    backward_names: Sequence[str]


@dataclass
class StepFinalizer:
    """Finalizes one step after the other, in their order and alike on every rank.

    On a GPU a step is finalized before the next one issues its first collective: the update of the one and the forward
    of the other are queued by then, so the device does not idle. On CPU, where reading costs nothing, it is finalized
    at once.

    Attributes:
        config_text: what all ranks must agree on, as canonical JSON.
        is_synchronous: whether a step is finalized when it is posted.
        applied_steps: updates of the masters.
        save_failed: whether a rank has reported that the save under way has failed; whoever raises the failure resets
            it.
    """

    comm: Communicator
    scale: LossScaleState
    skips: SkipCounter
    culprit_search: CulpritSearch
    config_text: str
    is_synchronous: bool
    applied_steps: int = 0
    save_failed: bool = False
    _last: _PostedStep | None = field(default=None, init=False)
    _readback: Readback = field(init=False)

    def __post_init__(self) -> None:
        self._readback = Readback(self.comm.device)

    def post(self, packed: Tensor, known: VoteRecord, collectives: tuple[str, ...]) -> None:
        """Starts the copy of a step's ``packed`` decision to the host; the step before it must be finalized."""
        assert self._last is None or self._last.outcome is not None
        self._last = _PostedStep(self._readback.post(packed), known, collectives)

    def outcome(self) -> StepOutcome:
        """Returns the outcome of the step posted last; if steps are not finalized at once, its fields are read lazily.

        Raises:
            NonFiniteError: too many skipped steps in a row.
            DivergenceError: the ranks no longer do the same thing.
        """
        step = self._last
        assert step is not None
        if self.is_synchronous:
            return self._finalized_outcome(step)
        return LazyOutcome(
            # once finalized, the ring buffer of the decision may be written again
            lambda: step.outcome or _outcome(step.peek(), step.known, None),
            lambda: self._finalized_outcome(step),
        )

    def _finalized_outcome(self, step: _PostedStep) -> StepOutcome:
        if step.outcome is None:
            self.finalize_step()
        assert step.outcome is not None
        return step.outcome

    def finalize_step(self) -> None:
        """Acts on the decision on the last step; ranks that skipped it search for the culprit together. Idempotent.

        Raises:
            DivergenceError: the ranks no longer do the same thing; nothing was updated.
            NonFiniteError: too many skipped steps in a row.
            UsageError: a weight that is negative or not finite.
        """
        step = self._last
        if step is None or step.outcome is not None:
            return
        if step.divergence is not None:
            raise step.divergence  # permanently: an engine whose ranks have diverged must not save or train again
        decision = step.peek()
        # kept until it is raised: that may be several steps later
        self.save_failed = self.save_failed or decision.save_failed
        # an error of the caller and not of the numbers: neither the scale nor the skips change
        if decision.reason == "bad_weight":
            step.outcome = _outcome(decision, step.known, None)  # set first, so that the error is raised once
            self.culprit_search.clear()
            _raise_bad_weight(decision)
        if decision.reason == "diverged":
            step.divergence = DivergenceError(
                explain(self.comm, decision.records, config_text=self.config_text, collectives=step.collectives)
            )
            raise step.divergence
        outcome = step.outcome = _outcome(decision, step.known, self._locate_culprit(decision))
        self.culprit_search.clear()
        # a non-finite forward loss leaves the scale alone: no scale fixes it
        if outcome.reason in (None, "overflow"):
            self._update_scale(found_inf=not outcome.applied, max_abs_grad=decision.max_abs_grad)
        if outcome.applied:
            self.applied_steps += 1
            self.skips.applied(outcome)
        else:
            self.skips.skipped(Skip.of(outcome, decision), self.scale)

    def _update_scale(self, *, found_inf: bool, max_abs_grad: float) -> None:
        before, self.scale = self.scale, self.scale.update(found_inf, max_abs_grad)
        change = self.scale.describe_change_since(before)
        if change:
            logger.info(change)

    def _locate_culprit(self, decision: DecodedDecision) -> Culprit | None:
        if decision.reason == "nonfinite_loss":
            return locate_bad_loss(decision)
        if decision.reason != "overflow":
            return None
        is_only_backward = self.comm.world_size == 1 and decision.records[0].num_micro_batches == 1
        # every rank comes here, because all derived the same reason
        findings = gather_findings(self.comm, self.culprit_search.find_nonfinite())
        return locate_bad_gradient(
            decision, findings, self.culprit_search.backward_names, is_only_backward=is_only_backward
        )


def _outcome(decision: DecodedDecision, known: VoteRecord, culprit: Culprit | None) -> StepOutcome:
    return StepOutcome(
        applied=decision.reason is None,
        reason=decision.reason,
        loss=decision.loss,
        grad_norm=decision.grad_norm,
        loss_scale=known.loss_scale,
        lr=known.lr,
        culprit=culprit,
        stop_requested=decision.stop_requested,
    )


def _raise_bad_weight(decision: DecodedDecision) -> NoReturn:
    micro_batch, rank = min((r.bad_weight, rank) for rank, r in enumerate(decision.records) if r.bad_weight >= 0)
    raise UsageError(
        f"the weight of micro-batch {micro_batch} of step {decision.records[0].step} on rank {rank} is negative or "
        f"not finite; expected a finite number >= 0, such as its token count"
    )
