"""The decision on a step: a pure function of the rows of all ranks, so every rank derives the same outcome.

Without it one rank would skip an overflowing step that the others apply, and the replicas would diverge silently. The
decision is a set of tensors on the device: the update that follows reads its coefficient, and whether it may write at
all, from there. The host decodes the decision later (``dtrain.engine.vote.readback``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtrain.engine.outcome import MAX_NORM
from dtrain.engine.vote.record import (
    COLUMNS,
    DEVICE_FLOATS,
    MUST_AGREE,
    NUM_DEVICE,
    NUM_HOST,
    DeviceRecord,
    HostRecord,
    RecordTable,
    upload,
)

REASONS = ("empty", "overflow", "nonfinite_loss", "bad_weight", "diverged")
"""Reasons not to apply a step, by code from 1. If several hold, the highest counts. The last two end the run."""

# adjacent in the row: loss scale, clipping threshold and factor of the gradient
_STEP_FLOATS = slice(COLUMNS["loss_scale"], COLUMNS["written_weights"])


@dataclass(frozen=True)
class Decision:
    """A decision on the device: 0-dim FP64 tensors, the same on every rank.

    Attributes:
        code: 0 to apply, else 1 + the index of the reason in ``REASONS``.
        loss: weighted mean over all micro-batches of all ranks.
        grad_norm: global L2 norm of the unscaled gradient; not finite if the step is skipped for it.
        grad_divisor: loss scale x sum of weights / (gradient factor x clip coefficient); main grads divided by it are
            the clipped gradient.
        rows: int64 [world_size, columns], from which it was derived.
    """

    code: Tensor
    loss: Tensor
    grad_norm: Tensor
    grad_divisor: Tensor
    rows: Tensor

    def pack(self) -> Tensor:
        """Returns int64 [4 + world_size x columns] on the device, so that one copy brings all of it to the host."""
        values = torch.stack((self.code, self.loss, self.grad_norm, self.grad_divisor))
        return torch.cat((values.view(torch.int64), self.rows.view(-1)))

    def missing(self, numbers: Sequence[int]) -> Tensor:
        """Returns whether no rank has a gradient of parameters ``numbers``, bool [n] on the device."""
        number = upload(numbers, self.rows.device)
        words = self.rows[:, NUM_HOST:-NUM_DEVICE].index_select(1, number >> 6)
        return ((words >> (number & 63)) & 1).amax(dim=0) == 0


def decide(
    rows: Tensor,
    *,
    sum_squares: Tensor | None = None,
    sum_weights: Tensor | None = None,
) -> Decision:
    """Decides on a step.

    Args:
        rows: int64 [world_size, number of fields], of all ranks; see ``dtrain.engine.vote.record``.
        sum_squares: the global sum of squares, if it was formed in canonical order; None sums those in the rows.
        sum_weights: the global sum of weights, likewise.
    """
    # compared as bits, so that two NaN agree and -0.0 differs from 0.0
    agreed = rows[:, : len(MUST_AGREE)]
    diverged = (agreed != agreed[0]).any()
    totals = rows[:, DEVICE_FLOATS].view(torch.float64).sum(dim=0)
    weights = totals[0] if sum_weights is None else sum_weights
    squares = totals[2] if sum_squares is None else sum_squares
    # the one division of a step: gradients are summed as they are, times loss scale and weight
    loss_scale, max_grad_norm, grad_factor = rows[0, _STEP_FLOATS].view(torch.float64).unbind()
    divisor = loss_scale * weights / grad_factor
    norm = squares.sqrt() / divisor
    # 1e-6 as in torch.nn.utils.clip_grad_norm_
    clip = torch.where(max_grad_norm.isinf(), 1.0, (max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
    has_weight = weights > 0  # not if NaN
    vetoes = (
        ~has_weight,
        # one element that is not finite is enough; infinite moments would freeze a weight for all later steps
        ~squares.isfinite() | (has_weight & (norm * clip > MAX_NORM)),
        (rows[:, COLUMNS["num_bad_losses"]] > 0).any(),
        (rows[:, COLUMNS["bad_weight"]] >= 0).any(),
        diverged,
    )
    codes = torch.arange(1.0, 1.0 + len(REASONS), dtype=torch.float64, device=rows.device)
    code = (torch.stack(vetoes) * codes).amax()  # 0 if no veto, else the highest
    # the clip coefficient joins the divisor, so that the update scales each gradient once
    return Decision(code, totals[1] / weights, norm, divisor / clip, rows)


def applied_values(numel: int, world_size: int) -> list[int]:
    """Returns ``numel`` values of ``Decision.pack`` that say that the step was applied."""
    zeros = HostRecord.from_row([0] * NUM_HOST)
    host, device = replace(zeros, loss_scale=1.0, grad_factor=1.0).to_row(), DeviceRecord(sum_weights=1.0).to_row()
    words = [-1] * ((numel - 4) // world_size - NUM_HOST - NUM_DEVICE)  # all parameters had a gradient
    return [0] * 4 + [*host, *words, *device] * world_size


@dataclass(frozen=True)
class DecodedDecision:
    """A decision that has reached the host, with the records it was derived from, in rank order.

    Attributes:
        reason: None to apply, else one of ``REASONS``; loss and norm are as in ``Decision``.
        hosts: the host's record of each rank.
        devices: the device's record of each rank.
        received: int64 [world_size, words], see ``dtrain.engine.vote.record.COLUMNS``.
    """

    reason: str | None
    loss: float
    grad_norm: float
    hosts: RecordTable[HostRecord]
    devices: RecordTable[DeviceRecord]
    received: Any = field(compare=False, repr=False)

    @staticmethod
    def of(reason: str | None, loss: float, grad_norm: float, rows: Any) -> DecodedDecision:
        """Returns the decision that was derived from ``rows``, numpy int64 [world_size, columns]."""
        hosts, devices = RecordTable(HostRecord, rows[:, :NUM_HOST]), RecordTable(DeviceRecord, rows[:, -NUM_DEVICE:])
        return DecodedDecision(reason, loss, grad_norm, hosts, devices, rows[:, NUM_HOST:-NUM_DEVICE])

    @staticmethod
    def unpack(values: Sequence[int] | Any, world_size: int) -> DecodedDecision:
        """Decodes ``values`` of ``Decision.pack``: numpy int64 [n], or integers."""
        numbers: Any = np.asarray(values, dtype=np.int64)
        code, loss, norm, _ = numbers[:4].view(np.float64).tolist()
        reason = REASONS[int(code) - 1] if code else None
        return DecodedDecision.of(reason, loss, norm, numbers[4:].reshape(world_size, -1))

    def missing(self, num_parameters: int) -> list[int]:
        """Returns the numbers of the parameters of which no rank has a gradient; none if nobody asked for them."""
        if not self.received.size:
            return []
        missing = ~np.bitwise_or.reduce(self.received, axis=0).astype("<i8")
        found: list[int] = (
            np.unpackbits(missing.view(np.uint8), bitorder="little")[:num_parameters].nonzero()[0].tolist()
        )
        return found

    @property
    def step(self) -> int:
        return self.hosts[0].step

    @property
    def max_abs_grad(self) -> float:
        """Largest magnitude in the gradients of all ranks, without the loss scale; see ``DeviceRecord``."""
        largest: float = max(self.devices.column("max_abs_grad"))
        return largest / self.hosts[0].loss_scale

    @property
    def num_bad_losses(self) -> int:
        """Micro-batches of all ranks whose loss is not finite."""
        return sum(self.devices.column("num_bad_losses"))

    @property
    def sum_weights(self) -> float:
        """Sum of the weights of all micro-batches of all ranks, in rank order."""
        total: float = sum(self.devices.column("sum_weights"))
        return total

    @property
    def stop_requested(self) -> bool:
        return any(self.hosts.column("stop_requested"))

    @property
    def save_failed(self) -> bool:
        return any(self.hosts.column("save_failed"))
