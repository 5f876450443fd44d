"""A device whose memory is not the host's, on a CPU: with real values, and copies that are made as late as they may be.

A copy to the host arrives when it is waited for; until then its target is NaN. A copy to the device is made at once,
for work that is queued behind it, and once more when it is waited for, or before the second next one: a device may read
the source until then. So a missing wait, or a buffer that is written too early, changes bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import dtrain
from dtrain.distributed.communicator import Communicator
from dtrain.sharding import offload

DIM = 32


class Late:
    """A copy that is made once, in the first wait."""

    def __init__(self, copy: Callable[[], object]) -> None:
        self._copy: Callable[[], object] | None = copy

    def wait(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy()


class LateLink(offload.DeviceLink):
    """A link between two memories that are one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._in_flight: deque[Late] = deque()

    def start_to_host(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Late:
        for target, _ in pairs:
            target.fill_(torch.nan)
        return Late(lambda: self._copy(pairs))

    def start_to_device(self, target: Tensor, source: Tensor) -> Late:
        if len(self._in_flight) == 2:
            self._in_flight.popleft().wait()
        target.copy_(source)
        self._in_flight.append(Late(lambda: target.copy_(source)))
        return self._in_flight[-1]


@contextmanager
def apart_memory() -> Iterator[None]:
    """Inside, engines are built as if the memory of their device were not the host's."""
    is_host = mock.patch.object(Communicator, "device_is_host", property(lambda self: False))
    with is_host, mock.patch.object(offload, "DeviceLink", LateLink):
        yield


class Blocks(nn.Module):
    """Four equal groups, so that copies take turns with the buffers; the norms and biases are of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.float().square().mean()


def make(*, is_offloaded: bool, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Blocks()
    settings = {"precision": "bf16", "zero_stage": 2, "seed": 0, "optimizer": dtrain.AdamW(lr=1e-2), **options}
    with apart_memory() if is_offloaded else nullcontext():
        return dtrain.initialize(model, **{"offload": "cpu" if is_offloaded else "none", **settings})


def train(engine: Any, num_steps: int = 3, weights: Sequence[float] = (1.0, 3.0), seed: int = 1) -> list[Any]:
    """Each step has one micro-batch for each of ``weights``."""
    generator = torch.Generator().manual_seed(seed)
    outcomes = []
    for _ in range(num_steps):
        for number in engine.accumulate(range(len(weights))):
            engine.backward(engine(torch.randn(4, DIM, generator=generator)), weight=weights[number])
        outcomes.append(engine.step())
    return outcomes


def state(engine: Any) -> dict[tuple[str, str], Tensor]:
    return {(kind, name): t.clone() for kind in engine.saved_dtypes for name, t in engine.full_state(kind)}


def is_equal(one: Any, other: Any) -> bool:
    first, second = state(one), state(other)
    return first.keys() == second.keys() and all(torch.equal(value, second[key]) for key, value in first.items())
