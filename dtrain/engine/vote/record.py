"""The vote: how all ranks come to one decision about a step, without the host.

Each rank fills one fixed-size record; one all-gather hands all records to all ranks; :func:`decide` is a pure function
of them, so every rank derives the same outcome. Without it one rank would skip an overflowing step that the others
apply, and the replicas would part without a word. The record also carries the loss and the norm, so it replaces the
collectives that those would need.

Record and decision are tensors on the device: the update that follows reads its coefficient and whether it may write at
all from there. The host learns the verdict when it looks (:mod:`dtrain.engine.vote.readback`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

REASONS = ("empty", "overflow", "nonfinite_loss", "bad_weight", "diverged")
"""Why a step is not applied, by code from 1: what explains more overrules. The last two end the run."""

MUST_AGREE = ("step", "config_hash", "num_micro_batches", "schedule_hash", "data_cursor", "lr", "loss_scale")
"""Fields that differ only if the ranks have diverged; the earliest cause first."""

NEVER = 2**62
"""Above every index: what a minimum over indices starts from."""


@dataclass(frozen=True)
class VoteRecord:
    """One rank's word on one step. Integers are 63 bits wide at most.

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
        save_failed: 1 if this rank knows that the save under way has failed.
        sum_weights: of this rank's micro-batches.
        sum_weighted_loss: sum of weight x loss over them.
        sum_squares: of this rank's shard of the main grads, still scaled; replicated elements counted once.
        bad_loss: the first loss that is not finite, else 0.
        max_abs_grad: of this rank's gradients as they left backward, still scaled; 0 where they were not measured.
        num_bad_losses: micro-batches whose loss is not finite.
        bad_micro_batch: the first of them, or -1.
        bad_weight: the first micro-batch whose weight is negative or not finite, or -1.
        bad_gradient: the number of this rank's first gradient that is not finite (see
            :class:`dtrain.parameters.gradient_monitor.GradientWatch`), or -1.
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
    sum_weights: float
    sum_weighted_loss: float
    sum_squares: float
    bad_loss: float = 0.0
    max_abs_grad: float = 0.0
    num_bad_losses: int = 0
    bad_micro_batch: int = -1
    bad_weight: int = -1
    bad_gradient: int = -1

    def to_row(self) -> list[int]:
        """The fields in their order; floats as their bit patterns, so nothing is rounded on the way."""
        return [_bits(getattr(self, name)) if name in _FLOATS else getattr(self, name) for name in _COLUMNS]

    @staticmethod
    def from_row(row: Sequence[int]) -> VoteRecord:
        """The inverse of :meth:`to_row`."""
        pairs = zip(_COLUMNS, row, strict=True)
        values: dict[str, Any] = {name: _float(bits) if name in _FLOATS else bits for name, bits in pairs}
        return VoteRecord(**values)


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


_COLUMNS = {field.name: number for number, field in enumerate(fields(VoteRecord))}
_FLOATS = {field.name for field in fields(VoteRecord) if field.type == "float"}
_NUM_HOST = _COLUMNS["save_failed"] + 1
_DEVICE_FLOATS = slice(_COLUMNS["sum_weights"], _COLUMNS["num_bad_losses"])
NUM_FIELDS = len(_COLUMNS)


@dataclass(frozen=True)
class Observations:
    """What a rank's device has seen of a step, as tensors.

    Attributes:
        floats: FP64 [5]: sum_weights, sum_weighted_loss, sum_squares, bad_loss, max_abs_grad.
        integers: int64 [4]: num_bad_losses, bad_micro_batch, bad_weight, bad_gradient.
    """

    floats: Tensor
    integers: Tensor


def fill(known: VoteRecord, seen: Observations) -> Tensor:
    """int64 [number of fields], on the device: the host's fields of ``known``, the device's from ``seen``."""
    host = upload(known.to_row()[:_NUM_HOST], seen.floats.device)
    return torch.cat((host, seen.floats.view(torch.int64), seen.integers))


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 [n] on ``device``, without waiting for it."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.int64)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def first_index(where: Tensor, index: Tensor) -> Tensor:
    """The least of ``index`` int64 [n] where ``where`` bool [..., n] holds, or -1."""
    least = torch.where(where, index, NEVER).amin(dim=-1)
    return torch.where(least == NEVER, -1, least)


@dataclass(frozen=True)
class Decision:
    """The verdict where it was taken: 0-dim FP64 tensors, the same on every rank.

    Attributes:
        code: 0 to apply, else 1 + the index of the reason in :data:`REASONS`.
        loss: weighted mean over all micro-batches of all ranks.
        grad_norm: global L2 norm of the unscaled gradient; not finite where the step is skipped for it.
        grad_divisor: loss scale x sum of weights / clip coefficient: what turns main grads into the clipped gradient.
    """

    code: Tensor
    loss: Tensor
    grad_norm: Tensor
    grad_divisor: Tensor

    def to_row(self) -> Tensor:
        """FP64 [4]."""
        return torch.stack((self.code, self.loss, self.grad_norm, self.grad_divisor))


def decide(
    rows: Tensor,
    *,
    max_grad_norm: float | None = None,
    sum_squares: Tensor | None = None,
    sum_weights: Tensor | None = None,
) -> Decision:
    """The decision on a step.

    Args:
        rows: int64 [world_size, number of fields], the records of all ranks.
        max_grad_norm: clipping threshold, or None.
        sum_squares: the global sum of squares, where it was formed in canonical order outside the records.
        sum_weights: the global sum of weights, likewise.
    """
    agreed = rows[:, : len(MUST_AGREE)]
    diverged = (agreed != agreed[0]).any()
    totals = rows[:, _DEVICE_FLOATS].view(torch.float64).sum(dim=0)
    weights = totals[0] if sum_weights is None else sum_weights
    squares = totals[2] if sum_squares is None else sum_squares
    column = _COLUMNS["loss_scale"]
    divisor = rows[0, column : column + 1].view(torch.float64)[0] * weights
    norm = squares.sqrt() / divisor
    clip = torch.ones_like(norm) if max_grad_norm is None else (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    vetoes = (
        ~(weights > 0),
        ~squares.isfinite(),
        (rows[:, _COLUMNS["num_bad_losses"]] > 0).any(),
        (rows[:, _COLUMNS["bad_weight"]] >= 0).any(),
        diverged,
    )
    codes = torch.arange(1.0, 1.0 + len(REASONS), dtype=torch.float64, device=rows.device)
    code = (torch.stack(vetoes) * codes).amax()
    return Decision(code, totals[1] / weights, norm, divisor / clip)


@dataclass(frozen=True)
class Verdict:
    """A decision that has reached the host, with the records it was derived from.

    Attributes:
        reason: None to apply, else one of :data:`REASONS`.
        loss: as in :class:`Decision`.
        grad_norm: as in :class:`Decision`.
        records: of all ranks, in rank order.
    """

    reason: str | None
    loss: float
    grad_norm: float
    records: tuple[VoteRecord, ...]

    @staticmethod
    def pack(decision: Decision, rows: Tensor) -> Tensor:
        """int64 [4 + world_size x fields], on the device: one copy brings all of it to the host."""
        return torch.cat((decision.to_row().view(torch.int64), rows.view(-1)))

    @staticmethod
    def unpack(values: Sequence[int]) -> Verdict:
        """The inverse of :meth:`pack`."""
        code, loss, norm, _ = map(_float, values[:4])
        rows = [values[start : start + NUM_FIELDS] for start in range(4, len(values), NUM_FIELDS)]
        reason = REASONS[int(code) - 1] if code else None
        return Verdict(reason, loss, norm, tuple(map(VoteRecord.from_row, rows)))

    @property
    def max_abs_grad(self) -> float:
        """Of all ranks' gradients, without the loss scale; see :class:`VoteRecord`."""
        return max(record.max_abs_grad for record in self.records) / self.records[0].loss_scale

    @property
    def stop_requested(self) -> bool:
        """Whether any rank wants to stop after this step."""
        return any(record.stop_requested for record in self.records)

    @property
    def save_failed(self) -> bool:
        """Whether the save under way has failed on any rank."""
        return any(record.save_failed for record in self.records)


@dataclass(frozen=True)
class Disagreement:
    """The first field on which a rank differs from rank 0."""

    field: str
    rank: int
    expected: int | float  # rank 0's
    got: int | float


def find_disagreement(records: Sequence[VoteRecord]) -> Disagreement | None:
    """The first field of :data:`MUST_AGREE` on which some rank differs from rank 0, or None."""
    rows = [record.to_row() for record in records]  # bits, as the device compares them
    for name in MUST_AGREE:
        column = _COLUMNS[name]
        for rank, row in enumerate(rows):
            if row[column] != rows[0][column]:
                return Disagreement(name, rank, getattr(records[0], name), getattr(records[rank], name))
    return None
