"""The device's part of a vote in one Triton kernel for the row and one for the decision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtrain.distributed.communicator import Communicator
from dtrain.engine.outcome import MAX_NORM
from dtrain.engine.request import StepOptions
from dtrain.engine.vote.decide import Decision
from dtrain.engine.vote.losses import LossAccumulator
from dtrain.engine.vote.record import COLUMNS, MUST_AGREE, NEVER, NUM_DEVICE, NUM_HOST
from dtrain.engine.vote.tensors import VoteTensors
from dtrain.kernels import vote
from dtrain.kernels.squares import SquareSums
from dtrain.kernels.tiles import launch
from dtrain.optim.tiled import build_error
from dtrain.parameters.gradient_monitor import GradientMonitor


class FusedVoteTensors(VoteTensors):
    """The same in two launches a step.

    Args:
        device: device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bad_gradient = torch.full((), NEVER, dtype=torch.int64, device=device)

    def record(
        self, known: Tensor, num_known: int, losses: LossAccumulator, monitor: GradientMonitor, squares: Tensor
    ) -> Tensor:
        row = torch.empty(num_known + NUM_DEVICE, dtype=torch.int64, device=self._device)
        values = losses.values()
        launch(
            vote.record,
            1,
            self._device,
            row,
            known,
            values,
            squares,
            monitor.max_abs(self._device),
            self.bad_gradient,
            len(losses),
            values.stride(0),
            squares.numel(),
            HOST=num_known,
            NEVER=NEVER,
            BLOCK=vote.BLOCK,
        )
        return row

    def decide(
        self, rows: Tensor, *, sum_squares: Tensor | None = None, sum_weights: Tensor | None = None
    ) -> tuple[Decision, Tensor]:
        packed = torch.empty(4 + rows.numel(), dtype=torch.int64, device=self._device)
        launch(
            vote.decide,
            1,
            self._device,
            packed,
            rows,
            rows if sum_squares is None else sum_squares,
            rows if sum_weights is None else sum_weights,
            rows.shape[0],
            AGREE=len(MUST_AGREE),
            LOSS_SCALE=COLUMNS["loss_scale"],
            MAX_GRAD_NORM=COLUMNS["max_grad_norm"],
            GRAD_FACTOR=COLUMNS["grad_factor"],
            HOST=rows.shape[1] - NUM_DEVICE,
            FIELDS=rows.shape[1],
            CANONICAL=sum_squares is not None,
            MAX_NORM=MAX_NORM,
            BLOCK=vote.BLOCK,
        )
        code, loss, grad_norm, grad_divisor = packed[:4].view(torch.float64).unbind()
        return Decision(code, loss, grad_norm, grad_divisor, rows), packed


def fused_vote(
    grads: Sequence[Tensor], chunk: int, options: StepOptions, comm: Communicator, num_words: int
) -> tuple[SquareSums, FusedVoteTensors]:
    """Returns the norm of ``grads`` and the vote as Triton kernels, a launch each; compiled.

    Args:
        grads: FP32, this rank's shards of the main grads, of whole chunks.
        chunk: elements of a chunk, whose sums a reproducible norm adds in order.
        options: settings of the step.
        comm: the ranks that vote.
        num_words: of a row, between the fields of host and device.

    Raises:
        ConfigError: Triton failed to compile or to launch.
    """
    squares = SquareSums(grads, chunk, by_chunk=options.reproducible)
    vote_tensors = FusedVoteTensors(comm.device)
    num_columns = NUM_HOST + num_words + NUM_DEVICE
    try:  # compiled now, because in a step a failure of one rank would leave the others waiting
        squares.compute()
        vote_tensors.decide(torch.zeros(comm.world_size, num_columns, dtype=torch.int64, device=comm.device))
    except Exception as error:
        raise build_error(error, comm.device) from error
    return squares, vote_tensors
