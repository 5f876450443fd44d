"""Random numbers of samples: a pure function of the sample's id, whatever rank or process draws them.

A source whose samples differ from epoch to epoch has the ids ``sample + num_samples * draw``, where the draw is a hash
of the seed and the epoch. Without a draw, ids below ``num_samples``, its samples are always the same.
"""

from __future__ import annotations

import numpy as np

from dtrain.data.sampling import Indices, mix, sample_ids

CONTENT, NOISE = range(2)
"""Streams: of what a sample shows, and of the noise that is added to it."""

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's, so that 0 does not hash to 0
_LARGEST_ID = 2**62


def drawn_ids(seed: int, indices: Indices, num_samples: int) -> Indices:
    """Returns ``dtrain.data.sampling.sample_ids`` with the draw of their epoch."""
    epochs = (indices // num_samples).astype(np.uint64)
    seeds = mix(np.array([seed % 2**64], np.uint64) + _INCREMENT)
    num_draws = _LARGEST_ID // num_samples - 1
    draws = 1 + (mix(epochs * _INCREMENT + seeds) % np.uint64(num_draws)).astype(np.int64)
    return sample_ids(seed, indices, num_samples) + num_samples * draws


def generator(sample_id: int, stream: int) -> np.random.Generator:
    """Returns a generator of its own for this id (Philox: Salmon et al., "Parallel Random Numbers", SC 2011).

    Args:
        stream: ``CONTENT`` or ``NOISE``, which draw different numbers.
    """
    return np.random.Generator(np.random.Philox(key=np.array([sample_id, stream], np.uint64)))


def spread(ids: Indices, count: int) -> Indices:
    """Returns a number below ``count`` for each id, evenly spread over any range of ids (Weyl's sequence)."""
    fractions = (ids.astype(np.uint64) * _INCREMENT) >> np.uint64(32)  # the increment is 2^64 / the golden ratio
    return ((fractions * np.uint64(count)) >> np.uint64(32)).astype(np.int64)


def held_out_rows(num_rows: int, percent: float) -> tuple[Indices, Indices]:
    """Returns the rows to train on and those to validate on, by a hash of the row's number; each side has one.

    Args:
        num_rows: at least 2.
    """
    hashes = mix(np.arange(1, num_rows + 1, dtype=np.uint64) * _INCREMENT)
    is_held_out = hashes < np.uint64(int(percent / 100 * 2**64))
    if not is_held_out.any():
        is_held_out[hashes.argmin()] = True
    if is_held_out.all():
        is_held_out[hashes.argmax()] = False
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
