"""Sums of counts over the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dtrain.distributed.communicator import Communicator

_ROW = 1 << 16  # elements that each rank sends at a time


def sum_over_ranks(comm: Communicator, values: Tensor, *, label: str) -> Tensor:
    """Returns the sum of ``values``, int64 or FP64 of one shape on all ranks, on the host; exact for integers."""
    return _gathered(comm, values, label, lambda rows: rows.sum(0))


def max_over_ranks(comm: Communicator, values: Tensor, *, label: str) -> Tensor:
    """Returns the maximum of each element of ``values`` over the ranks, on the host; NaN if any rank's is."""
    return _gathered(comm, values, label, lambda rows: rows.amax(0))


def _gathered(comm: Communicator, values: Tensor, label: str, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    rows = values.reshape(-1).split(_ROW) if values.numel() else ()
    parts = [reduce(comm.gather_rows(row.contiguous(), label=label)) for row in rows]
    if not parts:
        return torch.zeros(values.shape, dtype=values.dtype)
    return torch.cat(parts).view(values.shape).cpu()
