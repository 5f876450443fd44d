"""The sum of what the ranks sent, in rank order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 17  # elements that are summed at a time: they stay in a core's cache


def sum_in_order(output: Tensor, rows: Sequence[Tensor], dtype: torch.dtype, copies: Sequence[Tensor] = ()) -> None:
    """Writes the sum of two or more ``rows`` [n], from left to right, to ``output`` [n] FP32, which may be one of them.

    Each row is rounded to ``dtype`` first, which does nothing if it is the row's own. The sum is copied to ``copies``,
    which may be rows too.
    """
    first, *middle, last = rows
    numel = max(output.numel(), 1)
    size = min(_BLOCK, numel) if output.device.type == "cpu" else numel
    scratch = torch.empty(size, dtype=output.dtype, device=output.device)
    for start in range(0, output.numel(), size):
        block = slice(start, start + size)
        total = first[block].to(dtype).to(output.dtype)
        for row in middle:
            total = torch.add(total, row[block].to(dtype), out=scratch[: total.numel()])
        torch.add(total, last[block].to(dtype), out=output[block])
        for copy in copies:
            copy[block].copy_(output[block])
