"""The moving average of the weights by a hand-written Triton kernel, over any number of segments in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from dtrain.kernels.average import FIELDS, NUM_WARPS, TILE, average
from dtrain.kernels.tiles import TileTable
from dtrain.optim.rule import UpdateScalars
from dtrain.optim.tiled import build_error, runs


class TiledAverage:
    """``dtrain.optim.average.MovingAverage`` in one launch, with its bits; compiled before the first step.

    Args:
        decay: of the average in one applied step.
        segments: (master, average) of each segment, 1-D and FP32; several on one rank, or none.

    Raises:
        ConfigError: Triton failed to compile or to launch.
    """

    def __init__(self, decay: float, segments: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> None:
        self._weight = 1 - decay
        self._pairs = [pair for segment in segments for pair in segment]  # keeps what the table points to
        self._rows = list(accumulate(map(len, segments), initial=0))  # of the first pair of each segment
        self._table = None
        if self._pairs:  # a rank may have none
            device = self._pairs[0][0].device
            num_tiles = [-(-master.numel() // TILE) for master, _ in self._pairs]
            self._table = TileTable([_row(*pair) for pair in self._pairs], num_tiles, device)
            code, divisor = torch.ones(2, dtype=torch.float64, device=device).unbind()
            try:  # a skipped update changes no bit
                self.update(range(len(segments)), UpdateScalars(0.0, 1, grad_divisor=divisor, found_inf=code))
            except Exception as error:  # Triton's errors, and those of the C compiler that it runs
                raise build_error(error, device) from error

    def update(self, numbers: Sequence[int], scalars: UpdateScalars) -> None:
        """Advances the segments ``numbers``, with a launch for each run of adjacent ones; none of a skipped step."""
        if self._table is None:
            return
        for low, high in runs(numbers):
            self._table.launch(
                average,
                scalars.found_inf,
                self._weight,
                first=self._rows[low],
                last=self._rows[high],
                FIELDS=FIELDS,
                TILE=TILE,
                num_warps=NUM_WARPS,
                enable_fp_fusion=False,  # each operation is rounded by itself, as in tensor code
            )


def _row(master: Tensor, own: Tensor) -> list[int]:
    numel, addresses = master.numel(), [master.data_ptr(), own.data_ptr()]
    if numel % 16 or any(address % 16 for address in addresses):
        raise ValueError(f"{numel} elements of an average lie at {addresses}; expected multiples of 16")
    return [*addresses, numel]
