"""Measures the update of the masters, and what training without masters would lose of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dtrain.checkpoint.snapshot import TensorShard
from dtrain.distributed.communicator import Communicator
from dtrain.engine.measurement.totals import sum_over_ranks
from dtrain.precision.histogram import share
from dtrain.precision.report import UpdateShares

_CHUNK = 1 << 18  # elements at a time: bounds the temporary tensors, and they stay in a CPU's cache
_FORMATS = (torch.bfloat16, torch.float16)


class UpdateMeasurement:
    """Compares the masters that this rank owns with a copy from before the update: 4 bytes an element.

    Args:
        masters: this rank's owned shards before the update.
        numbers: number of each parameter by name.
        device: where the totals lie.
    """

    def __init__(self, masters: Iterable[TensorShard], numbers: Mapping[str, int], device: torch.device) -> None:
        self._numbers = numbers
        self._before = {shard.name: shard.data.clone() for shard in masters}
        self._device = device
        self._counts: Tensor | None = None
        self._squares: Tensor | None = None

    def finish(self, masters: Iterable[TensorShard]) -> None:
        """Compares with ``masters`` after the update, and drops the copy; the host waits for nothing."""
        size = len(self._numbers)
        counts = torch.zeros(size, 1 + len(_FORMATS), dtype=torch.int64, device=self._device)
        squares = torch.zeros(size, 2, dtype=torch.float64, device=self._device)
        for shard in masters:
            number, before = self._numbers[shard.name], self._before.pop(shard.name)
            for old, new in zip(before.split(_CHUNK), shard.data.split(_CHUNK), strict=True):
                own_counts, own_squares = _compare(old, new)
                counts[number] += own_counts.to(self._device)
                squares[number] += own_squares.to(self._device)
        self._counts, self._squares = counts, squares

    def totals(self, comm: Communicator) -> list[UpdateShares]:
        """Returns the updates of all parameters, in the order of their numbers; all ranks call."""
        assert self._counts is not None
        assert self._squares is not None
        counts = sum_over_ranks(comm, self._counts, label="counts of updates").tolist()
        squares = sum_over_ranks(comm, self._squares, label="norms of updates").tolist()
        return [_shares(*rows) for rows in zip(counts, squares, strict=True)]


def _compare(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the numbers of changed and lost elements, int64 [3], and the squares of update and weight, FP64 [2]."""
    update = new - old
    changed = update != 0
    counts = [changed.sum()]
    for dtype in _FORMATS:
        stored = old.to(dtype)
        counts.append((((stored.float() + update).to(dtype) == stored) & changed).sum())
    norms = torch.stack((torch.linalg.vector_norm(update), torch.linalg.vector_norm(old)))
    return torch.stack(counts), norms.double().square_()


def _shares(counts: Sequence[int], squares: Sequence[float]) -> UpdateShares:
    changed, *lost = counts
    update, weight = squares
    ratio = math.sqrt(update / weight) if weight else None
    return UpdateShares(changed, ratio, *(share(number, changed) for number in lost))
