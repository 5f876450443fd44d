"""The vote: how all ranks come to one decision about a step.

Each rank fills one fixed-size record; one all-gather hands all records to all ranks; :func:`decide` is a pure function
of them, so every rank derives the same outcome. Without it one rank would skip an overflowing step that the others
apply, and the replicas would part without a word. The record also carries the loss and the norm, so it replaces the
collectives that those would need.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import IntFlag

import torch
from torch import Tensor

from dtrain.distributed.collectives import Communicator


class Flags(IntFlag):
    """What a rank saw or wants."""

    NONFINITE_LOSS = 1
    NONFINITE_GRADIENT = 2
    STOP_REQUESTED = 4


@dataclass(frozen=True)
class VoteRecord:
    """One rank's word on one step. Integers are 63 bits wide at most.

    Attributes:
        step: attempted steps before this one.
        config_hash: of all that must be equal on all ranks.
        schedule_hash: of the collectives issued since the start.
        data_cursor: samples consumed before this step.
        num_micro_batches: of this step, on this rank.
        lr: learning rate of this step.
        loss_scale: in force during this step's backward.
        sum_weights: of this rank's micro-batches.
        sum_weighted_loss: sum of weight x loss over them.
        sum_squares: of this rank's shard of the main grads, still scaled; replicated elements counted once.
        flags: :class:`Flags`.
        bad_tensor: index of the first parameter with a non-finite main grad in this rank's shard, or -1.
        bad_micro_batch: first local micro-batch with a non-finite loss, or -1.
    """

    step: int
    config_hash: int
    schedule_hash: int
    data_cursor: int
    num_micro_batches: int
    lr: float
    loss_scale: float
    sum_weights: float
    sum_weighted_loss: float
    sum_squares: float
    flags: int = 0
    bad_tensor: int = -1
    bad_micro_batch: int = -1

    def to_row(self) -> Tensor:
        """int64 [number of fields]; floats as their bit patterns, so nothing is rounded on the way."""
        values = ((f.type, getattr(self, f.name)) for f in fields(self))
        return torch.tensor([_bits(v) if kind == "float" else v for kind, v in values], dtype=torch.int64)

    @staticmethod
    def from_row(row: Sequence[int]) -> VoteRecord:
        """The inverse of :meth:`to_row`."""
        names = [(f.name, f.type) for f in fields(VoteRecord)]
        values = {
            name: _float(bits) if kind == "float" else bits for (name, kind), bits in zip(names, row, strict=True)
        }
        return VoteRecord(**values)  # type: ignore[arg-type]


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


MUST_AGREE = ("step", "config_hash", "num_micro_batches", "schedule_hash", "data_cursor", "lr", "loss_scale")
"""Fields that differ only if the ranks have diverged; compared in this order."""


@dataclass(frozen=True)
class Disagreement:
    """The first field on which a rank differs from rank 0."""

    field: str
    rank: int
    expected: int | float  # rank 0's
    got: int | float


@dataclass(frozen=True)
class Verdict:
    """What all ranks decide about a step; the same value on every rank.

    Attributes:
        reason: None to apply, else ``nonfinite_loss``, ``overflow`` or ``empty``.
        loss: weighted mean over all micro-batches of all ranks.
        grad_norm: global L2 norm of the unscaled gradient; not finite where the step is skipped for it.
        grad_divisor: loss scale x sum of weights: what turns main grads into the gradient.
        stop_requested: whether any rank wants to stop after this step.
        bad_rank: the rank at fault, or -1.
        bad_tensor: index of the first parameter at fault, or -1.
        bad_micro_batch: index on ``bad_rank`` of the first micro-batch whose loss is not finite, or -1.
    """

    reason: str | None
    loss: float
    grad_norm: float
    grad_divisor: float
    stop_requested: bool
    bad_rank: int = -1
    bad_tensor: int = -1
    bad_micro_batch: int = -1


def collect(comm: Communicator, record: VoteRecord) -> list[VoteRecord]:
    """The records of all ranks, in rank order: the one collective of the vote."""
    rows = comm.gather_rows(record.to_row().to(comm.device), label="vote").tolist()
    return [VoteRecord.from_row(row) for row in rows]


def find_disagreement(records: Sequence[VoteRecord]) -> Disagreement | None:
    """The first field of :data:`MUST_AGREE` on which some rank differs from rank 0, or None."""
    for name in MUST_AGREE:
        expected = getattr(records[0], name)
        for rank, record in enumerate(records):
            got = getattr(record, name)
            if got != expected and not (math.isnan(got) and math.isnan(expected)):
                return Disagreement(name, rank, expected, got)
    return None


def decide(
    records: Sequence[VoteRecord], *, sum_squares: float | None = None, sum_weights: float | None = None
) -> Verdict:
    """The verdict on a step from agreeing records.

    Args:
        records: of all ranks.
        sum_squares: the global sum of squares, where it was formed in canonical order outside the records.
        sum_weights: the global sum of weights, likewise.
    """
    weights = math.fsum(r.sum_weights for r in records) if sum_weights is None else sum_weights
    weighted_loss = sum(r.sum_weighted_loss for r in records)
    squares = sum(r.sum_squares for r in records) if sum_squares is None else sum_squares
    flags = Flags(0)
    for record in records:
        flags |= Flags(record.flags)
    divisor = records[0].loss_scale * weights
    verdict = Verdict(
        reason=None,
        loss=weighted_loss / weights if weights else math.nan,
        grad_norm=math.sqrt(squares) / divisor if divisor and squares >= 0 else math.nan,
        grad_divisor=divisor,
        stop_requested=Flags.STOP_REQUESTED in flags,
    )
    if Flags.NONFINITE_LOSS in flags:
        return _blame(verdict, "nonfinite_loss", records, "bad_micro_batch")
    if Flags.NONFINITE_GRADIENT in flags:
        return _blame(verdict, "overflow", records, "bad_tensor")
    if not weights > 0:
        return _blame(verdict, "empty", records, None)
    return verdict


def _blame(verdict: Verdict, reason: str, records: Sequence[VoteRecord], field: str | None) -> Verdict:
    found = [(getattr(r, field), rank) for rank, r in enumerate(records) if getattr(r, field) >= 0] if field else []
    value, rank = min(found, default=(-1, -1))
    return replace(
        verdict,
        reason=reason,
        bad_rank=rank,
        bad_tensor=value if field == "bad_tensor" else -1,
        bad_micro_batch=value if field == "bad_micro_batch" else -1,
    )
