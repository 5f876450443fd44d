"""Random numbers keyed by what is computed, never by who computes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1


def rng_key(seed: int, step: int, index: int, call: int = 0) -> int:
    """A 63-bit key by rounds of splitmix64.

    Args:
        seed: of the run.
        step: attempted steps before this one.
        index: global index of the micro-batch.
        call: how many forwards this micro-batch has had.
    """
    key = 0
    for value in (seed, step, index, call):
        key = (key + value + 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ key >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ key >> 27) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key >> 1


@contextmanager
def keyed_rng(device: torch.device, key: int) -> Iterator[None]:
    """Runs its body with torch's generators seeded by ``key``, and gives the caller's state back afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(key)
        yield
