"""Tables of tiles: one launch of a Triton kernel over any number of tensors.

A launch costs a few microseconds, and a model has hundreds of tensors. Their addresses are written once into a table on
the device, which cuts each tensor into tiles of equal size. A program of the kernel reads the row of its tensor and the
number of its tile there::

    rows   int64 [tensors, fields]     addresses, sizes and options; the kernel names the fields
    tiles  int32 [tiles, 2]            (row, number of the tile in its tensor)

Addresses are not references: the code that builds a table must keep the tensors alive and at the same address.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch


class TileTable:
    """The rows of several tensors, and their tiles.

    Args:
        rows: a row for each tensor; all of one length.
        num_tiles: number of tiles of each tensor.
        device: device of the tensors.
    """

    def __init__(self, rows: Sequence[Sequence[int]], num_tiles: Sequence[int], device: torch.device) -> None:
        self._device = device
        self._starts = list(accumulate(num_tiles, initial=0))
        counts = torch.tensor(num_tiles, dtype=torch.int64)
        owners = torch.repeat_interleave(torch.arange(len(num_tiles)), counts)
        numbers = torch.arange(self._starts[-1]) - torch.tensor(self._starts[:-1], dtype=torch.int64)[owners]
        self.rows = torch.tensor(list(rows), dtype=torch.int64).to(device)
        self.tiles = torch.stack((owners, numbers), dim=1).int().to(device)

    def num_tiles(self, first: int = 0, last: int | None = None) -> int:
        """Returns the number of tiles of rows ``first`` up to ``last``, which is not included."""
        return self._starts[len(self._starts) - 1 if last is None else last] - self._starts[first]

    def launch(
        self, kernel: Any, *args: Any, first: int = 0, last: int | None = None, programs: int | None = None, **meta: Any
    ) -> None:
        """Launches ``kernel(rows, tiles, first tile, number of tiles, *args, **meta)``.

        Args:
            kernel: a ``@triton.jit`` function.
            args: its further arguments.
            first, last: the rows whose tiles are launched; ``last`` is not included.
            programs: number of programs, if each handles several tiles; None: one for each tile.
            meta: its compile-time arguments and options.
        """
        count = self.num_tiles(first, last)
        if count:
            table = (self.rows, self.tiles, self._starts[first], count)
            launch(kernel, programs or count, self._device, *table, *args, **meta)


def launch(kernel: Any, programs: int | tuple[int, ...], device: torch.device, *args: Any, **meta: Any) -> None:
    """Launches ``programs`` (a number, or a grid) of ``kernel(*args, **meta)`` on the current stream of ``device``."""
    # Triton launches on the current device; on a CPU, in tests, it interprets the kernel
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[programs if isinstance(programs, tuple) else (programs,)](*args, **meta)
