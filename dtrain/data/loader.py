"""Loads this rank's micro-batches in the global order of samples, ahead of the step that trains on them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dtrain.data.dataset import SampleSource
from dtrain.data.sampling import Indices, micro_batch_indices

Batch = list[dict[str, Tensor]]

_ORDERED = 4096  # samples of all ranks that are put in order by one call; it takes as long as four calls for 8
_VALIDATION_SEED = 0  # not the run's: validation losses of runs with different seeds stay comparable


class BatchStream(Protocol):
    """Endless iterator over the batches of a rank, of which each is the list of its micro-batches of one step."""

    @property
    def cursor(self) -> int:
        """Global samples consumed."""

    def __next__(self) -> Batch: ...


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
    _ids_ahead: deque[Indices] = field(init=False, default_factory=deque)

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.num_micro_batches * self.world_size

    def __iter__(self) -> BatchLoader:
        return self

    def __next__(self) -> Batch:
        if not self._ids_ahead:
            self._ids_ahead.extend(self._order_steps())
        ids = self._ids_ahead.popleft()
        self.cursor += self.global_batch_size
        return [self.source.batch(micro_batch) for micro_batch in ids]

    def _order_steps(self) -> Indices:
        """Returns the ids of this rank's samples in the next steps, [steps, micro-batches, samples]."""
        # each epoch has keys of its own, so more samples than there are would take longer
        steps = max(1, min(_ORDERED, self.source.num_samples) // self.global_batch_size)
        indices = [
            [
                self._indices(self.cursor + step * self.global_batch_size, micro)
                for micro in range(self.num_micro_batches)
            ]
            for step in range(steps)
        ]
        return self.source.order(self.seed, np.array(indices))

    def _indices(self, cursor: int, micro: int) -> Indices:
        return micro_batch_indices(cursor, micro, self.rank, self.world_size, self.micro_batch_size)


class PrefetchedBatches:
    """The batches of ``loader``, prepared by a thread while earlier ones are trained on; the same in the same order.

    Args:
        depth: batches prepared ahead; 0: each is prepared when it is asked for, without a thread.
        device: with a GPU, batches come in pinned memory.

    Attributes:
        cursor: global samples in the batches handed out; those prepared ahead do not count.
        waited_s: seconds that the last batch was waited for.
    """

    def __init__(self, loader: BatchStream, depth: int, device: torch.device) -> None:
        self.cursor = loader.cursor
        self.waited_s = 0.0
        self._loader = loader
        self._depth = depth
        self._device = device
        self._ahead: deque[Future[tuple[Batch, int]]] = deque()
        self._thread = ThreadPoolExecutor(1, "dtrain-data", self._enter_thread) if depth else None

    def _enter_thread(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # pinning would otherwise open a context on the first GPU

    def __next__(self) -> Batch:
        """Returns the next batch; raises what its preparation raised."""
        start = time.perf_counter()
        if self._thread is None:
            batch, self.cursor = self._prepare()
        else:
            while len(self._ahead) <= self._depth:
                self._ahead.append(self._thread.submit(self._prepare))
            batch, self.cursor = self._ahead.popleft().result()
        self.waited_s = time.perf_counter() - start
        return batch

    def _prepare(self) -> tuple[Batch, int]:
        batch = next(self._loader)
        if self._device.type == "cuda":
            batch = [{name: tensor.pin_memory() for name, tensor in micro.items()} for micro in batch]
        return batch, self._loader.cursor

    def close(self) -> None:
        """Ends the thread after the batch that it prepares now."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


def validation_batches(
    source: SampleSource, micro_batch_size: int, num_batches: int | None, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Yields this rank's share of the first ``num_batches`` micro-batches of ``source`` in a fixed shuffled order.

    None for ``num_batches`` yields all.

    Micro-batch ``m`` belongs to rank ``m % world_size``. No sample is used twice: a small source gives fewer
    micro-batches, and the last one may be smaller.

    Yields:
        (micro-batch, whether it counts). All ranks get the same number of items, because a forward may contain
        collectives. A rank without a micro-batch gets the first one again, which does not count.
    """
    total = -(-source.num_samples // micro_batch_size)
    if num_batches is not None:
        total = min(num_batches, total)
    end = min(total * micro_batch_size, source.num_samples)
    for first in range(0, total, world_size):
        index = first + rank
        start = index * micro_batch_size if index < total else 0
        ids = np.arange(start, min(start + micro_batch_size, end), dtype=np.int64)
        batch = source.batch(source.order(_VALIDATION_SEED, ids))
        yield batch, index < total
