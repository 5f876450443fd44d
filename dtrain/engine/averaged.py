"""``with engine.ema():``: the averages take the place of the masters, and the compute weights follow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dtrain.errors import UsageError
from dtrain.optim.average import EMA
from dtrain.parameters.model_states import MASTER, ModelStates
from dtrain.precision.remainder import read, write

_BLOCK = 1 << 20  # elements that are exchanged at a time


@contextmanager
def averaged_weights(states: ModelStates) -> Iterator[None]:
    """Inside, masters and averages are exchanged, and the compute weights follow.

    No memory is needed for it, and no bit is lost. All ranks call.

    Raises:
        UsageError: the engine keeps no average.
    """
    if EMA.name not in states.plan.specs:
        raise UsageError("engine.ema() without an average; keep one: dtrain.initialize(..., ema_decay=0.999)")
    with states.reads:
        _exchange(states)
    try:
        with states.reads:
            _refresh(states)
        yield
    finally:
        with states.reads:
            _exchange(states)
            _refresh(states)


def _refresh(states: ModelStates) -> None:
    states.release()
    states.refresh()


@torch.no_grad()
def _exchange(states: ModelStates) -> None:
    states.comm.barrier()  # other ranks may still read what was published: [Note: buffer reuse]
    averages = {shard.name: shard.data for shard in states.local_shards(EMA.name)}
    for shard in states.local_shards(MASTER):
        for start in range(0, shard.stop - shard.start, _BLOCK):
            block = slice(start, start + _BLOCK)
            master, average = shard.values[block], averages[shard.name][block]
            kept = average.clone()
            average.copy_(read(master))
            write(master, kept)
