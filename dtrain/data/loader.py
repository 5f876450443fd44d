"""Loads this rank's micro-batches in the global order of samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dtrain.data.dataset import SampleSource
from dtrain.data.sampling import micro_batch_indices

_VALIDATION_SEED = 0  # not the run's: validation losses of runs with different seeds stay comparable


@dataclass(eq=False)
class BatchLoader:
    """Endless iterator over steps; each item is the list of this rank's micro-batches of one step.

    Its whole state is ``cursor``, the number of global samples consumed. A loader started from a stored cursor resumes
    exactly there, also at another world size or global batch size.
    """

    source: SampleSource
    seed: int
    micro_batch_size: int
    num_micro_batches: int  # gradient accumulation steps on each rank
    rank: int = 0
    world_size: int = 1
    cursor: int = 0

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.num_micro_batches * self.world_size

    def __iter__(self) -> BatchLoader:
        return self

    def __next__(self) -> list[dict[str, Tensor]]:
        micro_batches = [self._micro_batch(micro) for micro in range(self.num_micro_batches)]
        self.cursor += self.global_batch_size
        return micro_batches

    def _micro_batch(self, micro: int) -> dict[str, Tensor]:
        indices = micro_batch_indices(self.cursor, micro, self.rank, self.world_size, self.micro_batch_size)
        return self.source.batch(self.source.order(self.seed, indices))


def validation_batches(
    source: SampleSource, micro_batch_size: int, num_batches: int, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Yields this rank's share of the first ``num_batches`` micro-batches of ``source`` in a fixed shuffled order.

    Micro-batch ``m`` belongs to rank ``m % world_size``. No sample is used twice: a small source gives fewer
    micro-batches, and the last one may be smaller.

    Yields:
        (micro-batch, whether it counts). All ranks get the same number of items, because a forward may contain
        collectives. A rank without a micro-batch gets the first one again, which does not count.
    """
    total = min(num_batches, -(-source.num_samples // micro_batch_size))
    end = min(total * micro_batch_size, source.num_samples)
    for first in range(0, total, world_size):
        index = first + rank
        start = index * micro_batch_size if index < total else 0
        ids = np.arange(start, min(start + micro_batch_size, end), dtype=np.int64)
        batch = source.batch(source.order(_VALIDATION_SEED, ids))
        yield batch, index < total
