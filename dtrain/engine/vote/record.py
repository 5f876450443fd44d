"""The record that each rank contributes to the vote on a step.

Each rank fills one fixed-size record, on its device; one all-gather hands all records to all ranks, and
:mod:`dtrain.engine.vote.decide` derives the same decision from them on every rank. The record also carries the loss and
the sum of squares of the gradient, so it replaces the collectives that those would need.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

MUST_AGREE = ("step", "config_hash", "num_micro_batches", "schedule_hash", "data_cursor", "lr", "loss_scale")
"""Fields that differ only if the ranks have diverged; the earliest cause first."""

NEVER = 2**62
"""A number above every index: the start value of a minimum over indices."""


@dataclass(frozen=True)
class VoteRecord:
    """One rank's contribution to the vote on one step. Integers are 63 bits wide at most.

    The host knows the first fields (``MUST_AGREE``, ``stop_requested``, ``save_failed``); the device fills the others.

    Attributes:
        step: attempted steps before this one.
        config_hash: of all that must be equal on all ranks.
        num_micro_batches: of this step, on this rank.
        schedule_hash: of the collectives issued since the start.
        data_cursor: samples consumed before this step.
        lr: learning rate of this step.
        loss_scale: in force during this step's backward.
        stop_requested: 1 if this rank wants to stop after this step.
        save_failed: 1 if this rank knows that the asynchronous save under way has failed.
        sum_weights: of this rank's micro-batches.
        sum_weighted_loss: sum of weight x loss over them.
        sum_squares: of this rank's shard of the main grads, still scaled; replicated elements counted once.
        bad_loss: the first loss that is not finite, else 0.
        max_abs_grad: of this rank's gradients as they left backward, still scaled; 0 if it was not recorded.
        num_bad_losses: micro-batches whose loss is not finite.
        bad_micro_batch: the first of them, or -1.
        bad_weight: the first micro-batch whose weight is negative or not finite, or -1.
        bad_gradient: the number of this rank's first gradient that is not finite (see
            :class:`dtrain.parameters.gradient_monitor.GradientMonitor`), or -1.
    """

    step: int
    config_hash: int
    num_micro_batches: int
    schedule_hash: int
    data_cursor: int
    lr: float
    loss_scale: float
    stop_requested: int
    save_failed: int
    sum_weights: float = 0.0
    sum_weighted_loss: float = 0.0
    sum_squares: float = 0.0
    bad_loss: float = 0.0
    max_abs_grad: float = 0.0
    num_bad_losses: int = 0
    bad_micro_batch: int = -1
    bad_weight: int = -1
    bad_gradient: int = -1

    def to_row(self) -> list[int]:
        """Returns the fields in their order; floats as their bit patterns, so that nothing is rounded."""
        return [_bits(getattr(self, name)) if name in _FLOATS else getattr(self, name) for name in COLUMNS]

    @staticmethod
    def from_row(row: Sequence[int]) -> VoteRecord:
        pairs = zip(COLUMNS, row, strict=True)
        values: dict[str, Any] = {name: float_of(bits) if name in _FLOATS else bits for name, bits in pairs}
        return VoteRecord(**values)


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def float_of(bits: int) -> float:
    """Returns the float whose FP64 bit pattern is ``bits``."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


COLUMNS = {field.name: number for number, field in enumerate(fields(VoteRecord))}
# annotations are strings here: from __future__ import annotations
_FLOATS = {field.name for field in fields(VoteRecord) if field.type == "float"}
NUM_HOST = COLUMNS["save_failed"] + 1
# adjacent in the record, so that the device reads and sums them as one slice
DEVICE_FLOATS = slice(COLUMNS["sum_weights"], COLUMNS["num_bad_losses"])
NUM_FIELDS = len(COLUMNS)


@dataclass(frozen=True)
class Observations:
    """The device's fields of a vote record, as tensors.

    Attributes:
        floats: FP64 [5]: sum_weights, sum_weighted_loss, sum_squares, bad_loss, max_abs_grad.
        integers: int64 [4]: num_bad_losses, bad_micro_batch, bad_weight, bad_gradient.
    """

    floats: Tensor
    integers: Tensor


def fill(known: VoteRecord, observed: Observations) -> Tensor:
    """Returns int64 [number of fields] on the device: the host's fields of ``known``, and the device's ``observed``."""
    # float bits travel as int64: one dtype, one all-gather
    host = upload(known.to_row()[:NUM_HOST], observed.floats.device)
    return torch.cat((host, observed.floats.view(torch.int64), observed.integers))


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """Returns int64 [n] on ``device`` without waiting for it."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.int64)
    # a copy from pageable memory would wait for the device
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def first_index(where: Tensor, index: Tensor) -> Tensor:
    """Returns the least of ``index`` int64 [n] at which ``where`` bool [..., n] is true, or -1."""
    least = torch.where(where, index, NEVER).amin(dim=-1)
    return torch.where(least == NEVER, -1, least)
