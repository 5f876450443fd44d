"""Sources made of others: what is held out of one and the rest, several one after another, a mixture by weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dtrain.data import sampling
from dtrain.data.dataset import SampleSource
from dtrain.data.sampling import Indices, mix

BLOCK = 10_000
"""Samples in which each source of a mixture has exactly its share."""

_HELD_OUT = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment, so that block 0 does not hash to 0


@dataclass(frozen=True)
class HeldOut(SampleSource):
    """``count`` of the samples of ``source`` that are held out from training, spread over all of it.

    One in each of ``num_held_out`` blocks of neighbors is held out, by a hash of the block's number: the same for all
    runs. So the place of a sample follows without memory, also among the rest.
    """

    source: SampleSource
    num_held_out: int
    count: int

    @property
    def num_samples(self) -> int:
        return self.count

    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        size = self.source.num_samples // self.num_held_out
        blocks = sample_ids * self.num_held_out // self.count
        return self.source.batch(blocks * size + _held_out(blocks, size))


@dataclass(frozen=True)
class NotHeldOut(SampleSource):
    """The samples of ``source`` of which none is in a ``HeldOut`` of as many; at most half are held out."""

    source: SampleSource
    num_held_out: int

    @property
    def num_samples(self) -> int:
        return self.source.num_samples - self.num_held_out

    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        size = self.source.num_samples // self.num_held_out
        blocks, places = np.divmod(sample_ids, size - 1)
        skipped = np.where(blocks < self.num_held_out, blocks + (places >= _held_out(blocks, size)), self.num_held_out)
        return self.source.batch(sample_ids + skipped)


def _held_out(blocks: Indices, size: int) -> Indices:
    """Returns the place of the sample of each block that is held out."""
    return (mix(blocks.astype(np.uint64) + _HELD_OUT) % np.uint64(size)).astype(np.int64)


class Concatenation(SampleSource):
    """Several sources: the ids of each follow those of the one before."""

    def __init__(self, sources: Sequence[SampleSource]) -> None:
        self.sources = tuple(sources)
        self._bounds = np.cumsum([0, *(source.num_samples for source in sources)])

    @property
    def num_samples(self) -> int:
        return int(self._bounds[-1])

    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        owners = np.searchsorted(self._bounds, sample_ids, side="right") - 1
        rows: dict[str, Tensor] = {}
        for number in np.unique(owners).tolist():
            own = torch.from_numpy(np.flatnonzero(owners == number))
            part = self.sources[number].batch(sample_ids[own.numpy()] - self._bounds[number])
            for name, values in part.items():
                rows.setdefault(name, values.new_empty((len(sample_ids), *values.shape[1:])))[own] = values
        return rows


class Mixture(Concatenation):
    """Several sources in the proportion of ``weights``, each in its own order and with its own epochs.

    Among the indices of each block of ``BLOCK``, every source has the same share. A permutation of the block,
    keyed by the seed, decides which; so the sample at an index needs no state.

    Attributes:
        shares: samples of each source in a block; 0 for a weight too small for one.
    """

    def __init__(self, sources: Sequence[SampleSource], weights: Sequence[float]) -> None:
        super().__init__(sources)
        self.shares = shares(weights)

    def order(self, seed: int, indices: Indices) -> Indices:
        places = sampling.sample_ids(seed, indices, BLOCK)  # within the block, permuted differently in each
        ends = np.cumsum(self.shares)
        owners = np.searchsorted(ends, places, side="right")
        ids = np.empty_like(indices)
        for number in np.unique(owners).tolist():
            own = owners == number
            share = self.shares[number]
            rank = places[own] - (ends[number] - share)
            ids[own] = self.sources[number].order(seed, indices[own] // BLOCK * share + rank) + self._bounds[number]
        return ids


def shares(weights: Sequence[float]) -> list[int]:
    """Divides ``BLOCK`` in the proportion of ``weights``, by largest remainders; of equals, the first gets more."""
    exact = np.array(weights) / sum(weights) * BLOCK
    floors = np.floor(exact).astype(np.int64)
    most = np.argsort(floors - exact, kind="stable")[: BLOCK - int(floors.sum())]
    floors[most] += 1
    return [int(share) for share in floors]
