"""Reads decisions on the host and acts on them: outcome, culprit, loss scale, applied steps, skips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache, partial
from typing import Any, NoReturn

from torch import Tensor

from dtrain.distributed.communicator import Communicator
from dtrain.distributed.logging import logger
from dtrain.engine.outcome import Culprit, StepOutcome
from dtrain.engine.run_state import RunState
from dtrain.engine.vote.decide import DecodedDecision, applied_values
from dtrain.engine.vote.divergence import explain
from dtrain.engine.vote.evidence import CalibrationEvidence
from dtrain.engine.vote.readback import Readback
from dtrain.engine.vote.skips import SkipCounter
from dtrain.errors import DivergenceError, UsageError
from dtrain.precision.loss_scale import LossScaleState


class LazyOutcome(StepOutcome):
    """An outcome that the host has not read yet.

    Args:
        read: reads all fields except the culprit; communicates with no rank.
        finalize_step: reads all fields; if the step was skipped, all ranks search for the culprit together.
    """

    def __init__(self, read: Callable[[], StepOutcome], finalize_step: Callable[[], StepOutcome]) -> None:
        self._read, self._finalize_step = read, finalize_step

    def set_values(self, outcome: StepOutcome) -> None:
        """Takes the values of ``outcome``; nothing is read from now on, and what reading needs is released."""
        self._read = self._finalize_step = lambda: outcome

    @property
    def applied(self) -> bool:
        return self._read().applied

    @property
    def reason(self) -> str | None:
        return self._read().reason

    @property
    def loss(self) -> float:
        return self._read().loss

    @property
    def weight(self) -> float:
        return self._read().weight

    @property
    def grad_norm(self) -> float:
        return self._read().grad_norm

    @property
    def loss_scale(self) -> float:
        return self._read().loss_scale

    @property
    def lr(self) -> float:
        return self._read().lr

    @property
    def culprit(self) -> Culprit | None:
        return self._finalize_step().culprit

    @property
    def stop_requested(self) -> bool:
        return self._read().stop_requested

    def __eq__(self, other: object) -> bool:
        return self._finalize_step() == (other._finalize_step() if isinstance(other, LazyOutcome) else other)

    __hash__ = StepOutcome.__hash__

    def __repr__(self) -> str:
        return repr(self._finalize_step())

    def __reduce__(self) -> tuple[Any, ...]:
        outcome = self._finalize_step()  # a copy or pickle holds values and not the device
        return StepOutcome, tuple(getattr(outcome, field.name) for field in fields(outcome))


class StepFinalizer:
    """Finalizes one step after the other, in their order and alike on every rank.

    On a GPU a step is finalized before the next one issues its first collective: the update of the one and the forward
    of the other are queued by then, so the device does not idle. On CPU, where reading costs nothing, it is finalized
    at once.

    Args:
        comm: the ranks.
        run: its applied steps.
        locate_culprit: returns the culprit of a skipped step, if it has one; all ranks call it together.
        on_finalized: called with each outcome and decision that did not end the run; all ranks call it together.
        evidence: what a calibration of the loss scale reports beside its choice; None: nothing.

    Attributes:
        scale: the loss scale after the last finalized step.
        skips: counts skipped steps.
        config_text: what all ranks must agree on, as canonical JSON.
        is_synchronous: whether the engine finalizes each step at its end.
        save_failed: whether a rank has reported that the save under way has failed; whoever raises the failure resets
            it.
    """

    def __init__(
        self,
        comm: Communicator,
        run: RunState,
        scale: LossScaleState,
        skips: SkipCounter,
        locate_culprit: Callable[[DecodedDecision], Culprit | None],
        on_finalized: Callable[[StepOutcome, DecodedDecision], None],
        config_text: str,
        *,
        is_synchronous: bool,
        evidence: CalibrationEvidence | None = None,
    ) -> None:
        self.scale = scale
        self.skips = skips
        self.config_text = config_text
        self.is_synchronous = is_synchronous
        self.save_failed = False
        self._comm = comm
        self._run = run
        self._locate_culprit = locate_culprit
        self._on_finalized = on_finalized
        self._evidence = evidence
        self._readback = Readback(comm.device, of_fake=partial(applied_values, world_size=comm.world_size))
        self._read: Callable[[], DecodedDecision] | None = None  # of the last step, until that is finalized
        self._collectives: Sequence[str] = ()  # that this rank issued in the last step
        self._written = "{}"  # fingerprints of the parameters that the user wrote before it, as JSON
        self._outcome: StepOutcome | None = None  # of the last finalized step
        self._lazy: LazyOutcome | None = None  # of the last step, if it was handed out before it was finalized
        self._divergence: DivergenceError | None = None

    def post(self, packed: Tensor, collectives: Sequence[str], written: str = "{}") -> None:
        """Starts the copy of a step's ``packed`` decision to the host; the step before it must be finalized."""
        assert self._read is None
        read = self._readback.post(packed)
        self._read = cache(lambda: DecodedDecision.unpack(read(), self._comm.world_size))
        self._collectives, self._written = collectives, written

    def outcome(self) -> StepOutcome:
        """Returns the outcome of the step posted last; until that is finalized, one whose fields are read lazily."""
        if self._read is None:
            return self._finalized_outcome()
        self._lazy = LazyOutcome(partial(self._undiagnosed_outcome, self._read), self._finalized_outcome)
        return self._lazy

    def _undiagnosed_outcome(self, read: Callable[[], DecodedDecision]) -> StepOutcome:
        return self._outcome_of(read(), culprit=None)

    def _finalized_outcome(self) -> StepOutcome:
        self.finalize_step()
        assert self._outcome is not None
        return self._outcome

    def finalize_step(self) -> None:
        """Acts on the decision on the last step; if it was skipped, all ranks search for the culprit. Idempotent.

        Raises:
            DivergenceError: the ranks no longer do the same thing; nothing was updated.
            NonFiniteError: too many skipped steps in a row.
            UsageError: a weight that is negative or not finite.
        """
        if self._divergence is not None:
            raise self._divergence  # permanently: an engine whose ranks have diverged must not save or train again
        if self._evidence is not None:
            self._evidence.log_pending()
        if self._read is not None:
            # under one name, because a rank may read an outcome between any two calls
            with self._comm.schedule.method("step"):
                self._act_on(self._read())

    def _act_on(self, decision: DecodedDecision) -> None:
        # kept until it is raised: that may be several steps later
        self.save_failed = self.save_failed or decision.save_failed
        if decision.reason == "diverged":
            self._divergence = DivergenceError(
                explain(
                    self._comm,
                    decision.hosts,
                    config_text=self.config_text,
                    collectives=self._collectives,
                    written=self._written,
                )
            )
            raise self._divergence
        outcome = self._outcome = self._outcome_of(decision, self._locate_culprit(decision))
        self._read = None  # before any error, so that it is raised once
        if self._lazy is not None:
            # its step's buffer may be written again
            self._lazy.set_values(outcome)
            self._lazy = None
        # an error of the caller and not of the numbers: neither the scale nor the skips change
        if decision.reason == "bad_weight":
            _raise_bad_weight(decision)
        # a non-finite forward loss leaves the scale alone: no scale fixes it
        if outcome.reason in (None, "overflow"):
            self._update_scale(found_inf=not outcome.applied, max_abs_grad=decision.max_abs_grad)
        self._on_finalized(outcome, decision)
        if outcome.applied:
            self._run.applied_steps += 1
            self.skips.applied(outcome)
        else:
            self.skips.skipped(outcome, decision, self.scale)

    def _update_scale(self, *, found_inf: bool, max_abs_grad: float) -> None:
        before, self.scale = self.scale, self.scale.update(found_inf, max_abs_grad)
        change = self.scale.describe_change_since(before)
        if self._evidence is not None and before.is_calibrating:
            if not found_inf:
                self._evidence.add_step(before.scale)
            if change:
                self._evidence.report(change, self.scale.scale)
                if self.is_synchronous:  # else the next step logs it, when its counts have arrived
                    self._evidence.log_pending()
        elif change:
            logger.info(change)

    def _outcome_of(self, decision: DecodedDecision, culprit: Culprit | None) -> StepOutcome:
        own = decision.hosts[self._comm.rank]
        return StepOutcome(
            applied=decision.reason is None,
            reason=decision.reason,
            loss=decision.loss,
            weight=decision.sum_weights,
            grad_norm=decision.grad_norm,
            loss_scale=own.loss_scale,
            lr=own.lr,
            culprit=culprit,
            stop_requested=decision.stop_requested,
        )


def _raise_bad_weight(decision: DecodedDecision) -> NoReturn:
    bad = [(device.bad_weight, rank) for rank, device in enumerate(decision.devices) if device.bad_weight >= 0]
    micro_batch, rank = min(bad)
    raise UsageError(
        f"the weight of micro-batch {micro_batch} of step {decision.step} on rank {rank} is negative or not finite; "
        f"expected a finite number >= 0, such as its token count"
    )
