"""The two records that each rank contributes to the vote on a step: what the host knows, and what the device found.

Each rank fills one row of fixed size on its device: the host's fields, then the device's. One all-gather hands the rows
to all ranks, and ``dtrain.engine.vote.decide`` derives the same decision from them on every rank. The row also
carries the loss and the sum of squares of the gradient, so it replaces the collectives that those would need.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

NEVER = 2**62
"""A number above every index: the start value of a minimum over indices."""


class _Record:
    """A dataclass whose fields are 64-bit numbers; integers are 63 bits wide at most.

    Attributes:
        layout: struct format of the fields: q is an integer, d a float.
    """

    layout: ClassVar[str]

    def to_row(self) -> list[int]:
        """Returns the fields in their order; floats as their bit patterns, so that nothing is rounded."""
        return memoryview(struct.pack(self.layout, *vars(self).values())).cast("q").tolist()

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Self:
        return cls(*struct.unpack(cls.layout, struct.pack(f"{len(row)}q", *row)))


@dataclass(frozen=True)
class HostRecord(_Record):
    """The host's fields: what one rank knows of a step before the device has run it.

    Attributes:
        step: attempted steps before this one.
        config_hash: of all that must be equal on all ranks.
        num_micro_batches: of this step, on this rank.
        schedule_hash: of the collectives issued since the start.
        data_cursor: samples consumed before this step.
        lr: learning rate of this step.
        loss_scale: in force during this step's backward.
        max_grad_norm: norm to which this step's gradient is clipped; infinite for no clipping.
        grad_factor: of this step's gradient, before its norm is taken.
        written_weights: hash of what the user has written to the parameters since the last step; 0 for nothing.
        stop_requested: 1 if a stop after this step was requested on this rank.
        save_failed: 1 if this rank knows that the asynchronous save under way has failed.
        busy_s: seconds in which this rank did not wait for others, in the window of steps that this one ends; else 0.
    """

    layout = "5q4d3qd"

    step: int
    config_hash: int
    num_micro_batches: int
    schedule_hash: int
    data_cursor: int
    lr: float
    loss_scale: float
    max_grad_norm: float
    grad_factor: float
    written_weights: int
    stop_requested: int
    save_failed: int
    busy_s: float


@dataclass(frozen=True)
class DeviceRecord(_Record):
    """The device's fields: what one rank found in a step.

    Attributes:
        sum_weights: of this rank's micro-batches.
        sum_weighted_loss: sum of weight x loss over them.
        sum_squares: of this rank's shard of the main grads, still scaled; replicated elements counted once.
        bad_loss: the first loss that is not finite, else 0.
        max_abs_grad: of this rank's gradients as they left backward, still scaled; 0 if it was not recorded.
        num_bad_losses: micro-batches whose loss is not finite.
        bad_micro_batch: the first of them, or -1.
        bad_weight: the first micro-batch whose weight is negative or not finite, or -1.
        bad_gradient: the number of this rank's first gradient that is not finite (see
            ``dtrain.parameters.gradient_monitor.GradientMonitor``), or -1.
    """

    layout = "5d4q"

    sum_weights: float = 0.0
    sum_weighted_loss: float = 0.0
    sum_squares: float = 0.0
    bad_loss: float = 0.0
    max_abs_grad: float = 0.0
    num_bad_losses: int = 0
    bad_micro_batch: int = -1
    bad_weight: int = -1
    bad_gradient: int = -1


NUM_HOST, NUM_DEVICE = len(fields(HostRecord)), len(fields(DeviceRecord))
NUM_FIELDS = NUM_HOST + NUM_DEVICE

COLUMNS = {field.name: number for number, field in enumerate(fields(HostRecord))} | {
    field.name: number - NUM_DEVICE for number, field in enumerate(fields(DeviceRecord))
}
"""Column of each field in a row: the host's are counted from its beginning, the device's from its end.

Between them lie the words of ``dtrain.engine.parts.missed_updates.MissedUpdates``, if there are any.
"""

MUST_AGREE = (
    "step", "config_hash", "num_micro_batches", "schedule_hash", "data_cursor", "lr", "loss_scale", "max_grad_norm",
    "grad_factor", "written_weights"
)  # fmt: skip
"""Fields that differ only if the ranks have diverged; the earliest cause first. They are the first of a row."""

Record = TypeVar("Record", bound=_Record)


class RecordTable(Sequence[Record], Generic[Record]):
    """The records of all ranks, made when they are read: making all in each step would cost host time per rank.

    Args:
        kind: ``HostRecord`` or ``DeviceRecord``.
        rows: numpy int64 [world_size, fields of the record].
    """

    def __init__(self, kind: type[Record], rows: Any) -> None:
        self._kind = kind
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> RecordTable[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | RecordTable[Record]:
        found = self._rows[index]
        return RecordTable(self._kind, found) if isinstance(index, slice) else self._kind.from_row(found.tolist())

    def __iter__(self) -> Iterator[Record]:
        return map(self._kind.from_row, self._rows.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecordTable) and self._kind is other._kind and np.array_equal(self._rows, other._rows)

    __hash__ = None  # type: ignore[assignment]

    def column(self, name: str) -> list[Any]:
        """Returns one field of all ranks, as Python numbers."""
        columns = {field.name: (n, field.type) for n, field in enumerate(fields(self._kind))}  # type: ignore[arg-type]
        number, kind = columns[name]
        values = self._rows[:, number]
        found: list[Any] = (values.view(np.float64) if kind == "float" else values).tolist()
        return found


# adjacent in the row, so that the device reads and sums them as one slice
DEVICE_FLOATS = slice(COLUMNS["sum_weights"], COLUMNS["num_bad_losses"])


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """Returns int64 [n] on ``device`` without waiting for it."""
    return pinned(values, device).to(device, non_blocking=True)


def pinned(values: Sequence[int], device: torch.device) -> Tensor:
    """Returns int64 [n] on the host, from where a copy to ``device`` does not wait for it."""
    return torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")


def first_index(where: Tensor, index: Tensor) -> Tensor:
    """Returns the least of ``index`` int64 [n] at which ``where`` bool [..., n] is true, or -1."""
    least = torch.where(where, index, NEVER).amin(dim=-1)
    return torch.where(least == NEVER, -1, least)
