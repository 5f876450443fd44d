"""The device's part of a vote: the row of this rank, and the decision from the rows of all."""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.engine.vote.decide import Decision, decide
from dtrain.engine.vote.losses import LossAccumulator
from dtrain.engine.vote.record import first_index, upload
from dtrain.parameters.gradient_monitor import GradientMonitor


class VoteTensors:
    """The device's part of a vote in tensor code: some fifty small operations a step.

    Attributes:
        bad_gradient: where the gradient monitor puts its finding on the device; None: it keeps a list.
    """

    bad_gradient: Tensor | None = None

    def record(
        self, known: Tensor, num_known: int, losses: LossAccumulator, monitor: GradientMonitor, squares: Tensor
    ) -> Tensor:
        """Returns this rank's row, int64 [columns] on the device; waits for nothing.

        Args:
            known: int64, what the host has sent: the columns that it knows, then the numbers of the micro-batches.
            num_known: number of these columns; the device's are filled here as ``DeviceRecord`` has them.
            losses: of this rank's micro-batches.
            monitor: recorded the gradients of the step.
            squares: FP64 [n] whose sum is that of the squares of this rank's main grads.
        """
        device = squares.device
        values = losses.values()
        # FP64, so that the order of ranks and micro-batches hardly matters
        loss, weight = values.double().unbind()
        bad_losses = ~loss.isfinite()
        bad_weights = ~weight.isfinite() | (weight < 0)
        micro_batches = known[num_known : num_known + len(losses)]
        # a micro-batch of weight 0 is a dummy: its loss does not count
        weighted_loss = (loss * weight).masked_fill(weight == 0, 0.0).sum()
        bad_loss = torch.where(bad_losses, loss, 0.0).gather(0, bad_losses.byte().argmax(dim=0, keepdim=True))[0]
        gradients, bad_gradients = monitor.finiteness()
        if bad_gradients is None:
            bad_gradient = upload([-1], device)[0]
        else:
            bad_gradient = first_index(bad_gradients, upload(gradients, device))
        floats = torch.stack((weight.sum(), weighted_loss, squares.sum(), bad_loss, monitor.max_abs(device)))
        integers = torch.stack(
            (
                bad_losses.sum(),
                first_index(bad_losses, micro_batches),
                first_index(bad_weights, micro_batches),
                bad_gradient,
            )
        )
        # float bits are sent as int64: one dtype, one all-gather
        return torch.cat((known[:num_known], floats.view(torch.int64), integers))

    def decide(
        self, rows: Tensor, *, sum_squares: Tensor | None = None, sum_weights: Tensor | None = None
    ) -> tuple[Decision, Tensor]:
        """Returns the decision, and what the host unpacks as ``DecodedDecision``; see ``decide``."""
        decision = decide(rows, sum_squares=sum_squares, sum_weights=sum_weights)
        return decision, decision.pack()
