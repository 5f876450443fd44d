"""A device whose memory is not the host's, on a CPU: with real values, and copies that are made as late as they may be.

A copy to the host arrives when it is waited for; until then its target is NaN. A copy to the device is made at once,
for work that is queued behind it, and once more when it is waited for, or before the second next one: a device may read
the source until then. So a missing wait, or a buffer that is written too early, changes bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from dtrain.distributed.communicator import Communicator
from dtrain.sharding import offload


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
