"""Batches whose sizes change at given steps: more micro-batches, or the same samples cut into shorter rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dtrain.config.growth import BatchGrowth
from dtrain.data.loader import Batch, BatchLoader

POSITIONS = "positions"


class GrowingBatches:
    """Endless iterator over steps, as ``BatchLoader``, with the batch that ``growth`` gives each attempted step.

    A micro-batch has the same samples and tokens in all phases, so that the order of samples and the weights of
    micro-batches do not depend on the growth, and no row length occurs that no phase has.

    Args:
        loader: of the first phase; gives whole samples.
        growth: whose batches ``loader``'s ranks can share in whole micro-batches.
        step: attempted steps before the first batch.
    """

    def __init__(self, loader: BatchLoader, growth: BatchGrowth, step: int) -> None:
        self._loader = loader
        self._growth = growth
        self._step = step

    @property
    def cursor(self) -> int:
        """Global samples consumed."""
        return self._loader.cursor

    def __iter__(self) -> GrowingBatches:
        return self

    def __next__(self) -> Batch:
        phase = self._growth.at(self._step)
        if phase.global_batch_size != self._loader.global_batch_size:
            unit = self._loader.micro_batch_size * self._loader.world_size
            self._loader = replace(self._loader, num_micro_batches=phase.global_batch_size // unit)
        batch = next(self._loader)
        self._step += 1
        if phase.seq_len == self._growth.sample_len:
            return batch
        return [cut_rows(micro_batch, phase.seq_len) for micro_batch in batch]


def cut_rows(batch: dict[str, Tensor], seq_len: int) -> dict[str, Tensor]:
    """Returns the samples [B, T] of ``batch`` as rows [B x T / seq_len, seq_len] of the same tokens in the same order.

    A row is a context of its own: positions restart with it, as they do with each document inside of it. The last
    target of a row is the first token of the next one, so every target counts as before.
    """
    rows = {name: values.reshape(-1, seq_len) for name, values in batch.items()}
    if POSITIONS in rows:
        columns = torch.arange(seq_len)
        begins = torch.where(rows[POSITIONS] == 0, columns, 0)
        rows[POSITIONS] = columns - begins.cummax(1).values
    return rows
