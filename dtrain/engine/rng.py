"""Random numbers keyed by the micro-batch, never by the rank, so that they are equal at any world size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1


def rng_key(seed: int, step: int, index: int, call: int = 0) -> int:
    """Returns a 63-bit key, mixed by rounds of splitmix64 (Steele, Lea and Flood 2014).

    Args:
        seed: of the run.
        step: attempted steps before this one.
        index: global index of the micro-batch.
        call: number of earlier forwards of this micro-batch.
    """
    key = 0
    # each value has its own round, so that (1, 2) and (2, 1) give different keys
    for value in (seed, step, index, call):
        key = (key + value + 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ key >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ key >> 27) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key >> 1


@contextmanager
def keyed_rng(device: torch.device, key: int) -> Iterator[None]:
    """Runs its body with torch's generators seeded by ``key``, then restores the caller's generator states."""
    # not fork_rng and manual_seed, which visit every kind of device: 300 us for each forward instead of 10
    generators = generators_of(device)
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(key)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Returns torch's generators that a forward on ``device`` draws from."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
