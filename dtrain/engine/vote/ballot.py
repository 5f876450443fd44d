"""The vote on a step: this rank's row, the rows of all, and the same decision on every rank."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dtrain.distributed.communicator import Communicator
from dtrain.engine.parts.missed_updates import MissedUpdates
from dtrain.engine.parts.part import StepUnderWay
from dtrain.engine.vote.decide import Decision
from dtrain.engine.vote.losses import LossAccumulator
from dtrain.engine.vote.record import NUM_HOST, HostRecord, upload
from dtrain.engine.vote.tensors import VoteTensors
from dtrain.optim.rule import SentNumbers
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
        numbers: those that the update reads on the device; they are sent with what the vote needs.
        send: brings words to the device, int64 [n].
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
        self.numbers = SentNumbers()
        self.send: Callable[[Sequence[int]], Tensor] = partial(upload, device=comm.device)
        self._comm = comm
        self._config_hash = config_hash
        self._losses = losses
        self._monitor = monitor
        self.missed = missed

    def words(self, step: StepUnderWay) -> list[int]:
        """Returns all that the host sends to the device for the vote on ``step`` and its update, in one copy.

        These are the host's columns of the row, the numbers of the micro-batches, and the numbers of the update.
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
        numbers = self.numbers.compute(step.lr, step.update, step.rule_lrs)
        return [*host.to_row(), *self.missed.words(), *self._losses.micro_batches, *float_words(numbers)]

    def num_words(self, num_micro_batches: int) -> int:
        """Returns the number of ``words`` of a step, once there has been one."""
        return NUM_HOST + self.missed.num_words + num_micro_batches + -(-self.numbers.count // 2)

    def cast(
        self, step: StepUnderWay, squares: Tensor, canonical_sums: Callable[[Tensor], dict[str, Tensor]]
    ) -> tuple[Decision, Tensor]:
        """Returns the decision of all ranks, and what the host unpacks as ``DecodedDecision``; all ranks call.

        Args:
            step: see ``words``.
            squares: FP64 [n] whose sum is that of the squares of this rank's main grads.
            canonical_sums: returns the ``sum_squares`` and ``sum_weights`` of ``decide`` that are formed in
                canonical order; it may communicate.
        """
        # before the sums, which may communicate: the hash is of the collectives before
        known, num_known = self.send(self.words(step)), NUM_HOST + self.missed.num_words
        self.numbers.receive(known[num_known + len(self._losses) :].view(torch.float32))
        sums = canonical_sums(squares)
        row = self.tensors.record(known, num_known, self._losses, self._monitor, squares)
        return self.tensors.decide(self._comm.gather_rows(row, label="vote"), **sums)


def float_words(numbers: Sequence[float]) -> list[int]:
    """Returns ``numbers`` in FP32, two to a word of 64 bits."""
    padded = array("f", [*numbers, *[0.0] * (len(numbers) % 2)])  # rounds to FP32
    return memoryview(padded.tobytes()).cast("q").tolist()
