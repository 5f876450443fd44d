"""The exponential moving average of the weights (EMA): one more state of each parameter, advanced by applied steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtrain.optim.rule import SegmentKernel, StateSpec, UpdateScalars, UpdateSlice
from dtrain.precision.fake import block_starts
from dtrain.precision.remainder import Numbers, read

EMA = StateSpec("ema", init=None)
"""The average, FP32; before the first update it is the master."""

_BLOCK = 512 * 1024  # elements, as of an update: few enough to stay in the cache of a CPU
_PAIRS = 1 << 24  # of masters that are pairs, on a GPU: their FP32 values take 64 MiB


class MovingAverage:
    """Advances the averages of some tensors after the update of their masters; a ``SegmentKernel``.

    ``average += (1 - decay) * (master - average)``, each operation rounded by itself, so that any cut and any sharding
    give the same bits.

    Args:
        decay: of the average in one applied step.
        segments: (master, average) of each segment, 1-D and FP32, masters also as pairs; several on one rank, or none.
    """

    def __init__(self, decay: float, segments: Sequence[Sequence[tuple[Numbers, Tensor]]]) -> None:
        self._weight = 1 - decay
        self._segments = [[pair for whole in segment for pair in _blocks(*whole)] for segment in segments]

    @torch.no_grad()
    def update(self, numbers: Sequence[int], scalars: UpdateScalars) -> None:
        """Advances segments ``numbers``; none if ``scalars.found_inf`` is set, decided on the device."""
        skip = scalars.tensors[3] != 0
        for master, average in (pair for number in numbers for pair in self._segments[number]):
            advanced = torch.sub(read(master), average).mul_(self._weight).add_(average)
            torch.where(skip, average, advanced, out=average)


def average_kernel(decay: float, segments: Sequence[Sequence[UpdateSlice]], *, is_compiled: bool) -> SegmentKernel:
    """Returns what advances the averages of the slices of each segment; on a GPU a Triton kernel if ``is_compiled``."""
    pairs = [[(part.master, part.average) for part in segment if part.average is not None] for segment in segments]
    plain = [[(master, own) for master, own in segment if isinstance(master, Tensor)] for segment in pairs]
    device = next((own.device.type for segment in pairs for _, own in segment), "cpu")
    if is_compiled and device == "cuda" and sum(map(len, plain)) == sum(map(len, pairs)):  # the kernel reads no pairs
        from dtrain.optim.tiled_average import TiledAverage  # it imports Triton, which only GPUs need

        return TiledAverage(decay, plain)
    return MovingAverage(decay, pairs)


def _blocks(master: Numbers, average: Tensor) -> list[tuple[Numbers, Tensor]]:
    size = _BLOCK if master.device.type == "cpu" else max(master.numel(), 1)
    if not isinstance(master, Tensor):
        size = min(size, _PAIRS)
    return [(master[start : start + size], average[start : start + size]) for start in block_starts(average, size)]
