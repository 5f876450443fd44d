"""Computes the order of samples as a pure function of (seed, global index), without stored state.

Epoch ``e`` visits ``range(num_samples)`` in the order of a pseudo-random permutation keyed by (seed, e): a balanced
Feistel network over the next power of four, walked until the value falls inside the range (cycle walking; Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 3). Each sample is used exactly once per epoch at
any world size. Memory is O(1), and so is seeking to any index.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_NUM_ROUNDS = 8  # one SHA-512 gives eight round keys of 64 bits


def sample_id(seed: int, index: int, num_samples: int) -> int:
    """Returns the sample at global ``index`` of the endless shuffled stream over ``num_samples`` samples."""
    return int(sample_ids(seed, np.array([index], dtype=np.int64), num_samples)[0])


def sample_ids(seed: int, indices: Indices, num_samples: int) -> Indices:
    """Returns the ``sample_id`` of every element of ``indices``, in the same shape."""
    epochs, positions = np.divmod(indices, num_samples)
    out = np.empty_like(indices)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        out[chosen] = _permute(positions[chosen], _round_keys(seed, int(epoch)), num_samples)
    return out


def micro_batch_indices(cursor: int, micro: int, rank: int, world_size: int, micro_batch_size: int) -> Indices:
    """Returns the global sample indices of one micro-batch of the step that starts at ``cursor``.

    The micro-batch's global index is ``m = micro * world_size + rank``, so that every world size computes the same
    micro-batches. ``cursor`` is the number of samples that all ranks have consumed before this step.
    """
    start = cursor + (micro * world_size + rank) * micro_batch_size
    return np.arange(start, start + micro_batch_size, dtype=np.int64)


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    return np.frombuffer(hashlib.sha512(f"dtrain:{seed}:{epoch}".encode()).digest(), dtype="<u8", count=_NUM_ROUNDS)


def _permute(positions: Indices, keys: NDArray[np.uint64], num_samples: int) -> Indices:
    # two halves of equal width: the domain is at most 4 times too large, so few values need many rounds of walking
    half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    values = _feistel(positions.astype(np.uint64), keys, half_bits)
    while (outside := values >= num_samples).any():
        values[outside] = _feistel(values[outside], keys, half_bits)
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], keys: NDArray[np.uint64], half_bits: int) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right + key) & mask)
    return (left << shift) | right


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014); arithmetic wraps at 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
