"""The device's part of a vote: the record of this rank, and the decision from the records of all."""

from __future__ import annotations

from torch import Tensor

from dtrain.engine.vote.decide import Decision, DecodedDecision, decide
from dtrain.engine.vote.losses import LossAccumulator
from dtrain.engine.vote.record import VoteRecord, fill
from dtrain.parameters.gradient_monitor import GradientMonitor


class VoteTensors:
    """In tensor code: some fifty small operations a step.

    Args:
        max_grad_norm: clipping threshold, or None.

    Attributes:
        bad_gradient: where the gradient monitor puts its finding on the device; None: it keeps a list.
    """

    bad_gradient: Tensor | None = None

    def __init__(self, max_grad_norm: float | None) -> None:
        self._max_grad_norm = max_grad_norm

    def record(self, known: VoteRecord, losses: LossAccumulator, monitor: GradientMonitor, squares: Tensor) -> Tensor:
        """Returns int64 [number of fields] on the device; waits for nothing.

        Args:
            known: the host's fields.
            losses: of this rank's micro-batches.
            monitor: recorded the gradients of the step.
            squares: FP64 [n] whose sum is that of the squares of this rank's main grads.
        """
        return fill(known, losses.observe(monitor, squares))

    def decide(
        self, rows: Tensor, *, sum_squares: Tensor | None = None, sum_weights: Tensor | None = None
    ) -> tuple[Decision, Tensor]:
        """Returns the decision, and what the host unpacks as :class:`DecodedDecision`; see :func:`decide`."""
        decision = decide(rows, max_grad_norm=self._max_grad_norm, sum_squares=sum_squares, sum_weights=sum_weights)
        return decision, DecodedDecision.pack(decision, rows)
