"""The vote on a step: this rank's row, the rows of all, and the same decision on every rank."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dtrain.distributed.communicator import Communicator
from dtrain.engine.parts.missed_updates import MissedUpdates
from dtrain.engine.parts.part import StepUnderWay
from dtrain.engine.vote.decide import Decision
from dtrain.engine.vote.losses import LossAccumulator
from dtrain.engine.vote.record import HostRecord
from dtrain.engine.vote.tensors import VoteTensors
from dtrain.parameters.gradient_monitor import GradientMonitor


class Ballot:
    """Votes for one rank.

    Args:
        comm: the ranks.
        config_hash: of all that must be equal on all ranks.
        losses: of this rank's micro-batches.
        monitor: recorded their gradients.
        missed: knows of which parameters this rank has a gradient.

    Attributes:
        tensors: the device's part.
        missed: see above.
    """

    def __init__(
        self,
        comm: Communicator,
        config_hash: int,
        losses: LossAccumulator,
        monitor: GradientMonitor,
        missed: MissedUpdates,
    ) -> None:
        self.tensors = VoteTensors()
        self._comm = comm
        self._config_hash = config_hash
        self._losses = losses
        self._monitor = monitor
        self.missed = missed

    def cast(
        self, step: StepUnderWay, squares: Tensor, canonical_sums: Callable[[Tensor], dict[str, Tensor]]
    ) -> tuple[Decision, Tensor]:
        """Returns the decision of all ranks, and what the host unpacks as ``DecodedDecision``; all ranks call.

        Args:
            step: see ``HostRecord`` for its fields.
            squares: FP64 [n] whose sum is that of the squares of this rank's main grads.
            canonical_sums: returns the ``sum_squares`` and ``sum_weights`` of ``decide`` that are formed in
                canonical order; it may communicate.
        """
        host = HostRecord(
            step=step.number,
            config_hash=self._config_hash,
            num_micro_batches=len(self._losses),
            schedule_hash=self._comm.schedule.hash,
            data_cursor=step.data_cursor,
            lr=step.lr,
            loss_scale=step.loss_scale,
            max_grad_norm=step.max_grad_norm,
            grad_factor=step.grad_factor,
            written_weights=step.written_weights,
            stop_requested=int(step.stop_requested),
            save_failed=int(step.save_failed),
            busy_s=step.busy_s,
        )
        sums = canonical_sums(squares)  # after the record: it communicates, and the hash is of what came before
        row = self.tensors.record(host, self.missed.words(), self._losses, self._monitor, squares)
        return self.tensors.decide(self._comm.gather_rows(row, label="vote"), **sums)
