"""Counts the magnitudes of several tensors over a step, such as the gradient of each parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.precision.histogram import NUM_BINS, add_magnitudes


class MagnitudeCounts:
    """Histograms and largest magnitudes of numbered tensors, over the micro-batches of a step on this rank.

    The host waits for nothing.

    Attributes:
        counts: int64 [size, 512]; see ``dtrain.precision.histogram.count_magnitudes``.
        largest: FP32 [size]; NaN if an element is.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.counts = torch.zeros(size, NUM_BINS, dtype=torch.int64, device=device)
        self.largest = torch.zeros(size, device=device)

    def add(self, number: int, values: Tensor, *, num_padding: int = 0) -> None:
        """Adds the elements of ``values``, at least one, to ``number``, except ``num_padding`` zeros."""
        counts = self.counts[number]
        add_magnitudes(counts, values)
        if num_padding:
            counts[0] -= num_padding
        least, most = torch.aminmax(values.detach())  # one pass; propagates NaN
        largest = self.largest[number]
        torch.maximum(largest, torch.maximum(-least, most).float(), out=largest)
