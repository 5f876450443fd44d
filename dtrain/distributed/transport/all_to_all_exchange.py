"""The exchange of micro-batch gradients by an all-to-all, from memory of this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dtrain.distributed.communicator import GradientHandle, GradientSend, Handle
from dtrain.distributed.transport.gradient_buffers import PrivateExchange, Rows

_WEIGHT_NUMEL = 64  # elements that a weight takes, so that the shards after it are aligned


class _Sender(Protocol):
    """The part of a communicator that the exchange uses."""

    device: torch.device
    world_size: int

    def all_to_all_single(self, output: Tensor, flat: Tensor, *, label: str) -> Handle: ...


class AllToAllExchange(PrivateExchange):
    """Sends gradients from memory of this rank; the weight of a micro-batch follows each shard of its first send."""

    def __init__(self, comm: _Sender, sends: Sequence[GradientSend]) -> None:
        super().__init__(sends, comm.device, 2, comm.world_size * _WEIGHT_NUMEL)  # sent and received
        self._comm = comm
        self._weight = torch.empty(0)
        self._first: _ReceivedGradient | None = None  # of this micro-batch

    def gap(self, index: int) -> int:
        return 0 if index else _WEIGHT_NUMEL

    def begin(self, weight: Tensor) -> None:
        self._weight, self._first = weight, None

    def send(self, index: int) -> GradientHandle:
        send, gradient, number = self.take_opened(index)
        if self._first is None:
            self.weights(gradient).copy_(self._weight)
        received = self.pool.take("received", gradient.numel(), send.dtype)
        sent = send.numel + self._comm.world_size * self.gap(index)
        arrival = self._comm.all_to_all_single(received[:sent], gradient[:sent], label=send.label)
        handle = _ReceivedGradient(self, number, index, (gradient, received), arrival, self._first)
        self._first = self._first or handle
        return handle

    def shards(self, index: int, buffer: Tensor) -> Sequence[Tensor]:
        """Returns the shard of each rank in ``buffer``, which was sent or received."""
        numel = self.sends[index].numel // self._comm.world_size
        stride = numel + self.gap(index)
        return Rows(buffer[: self._comm.world_size * stride].view(self._comm.world_size, stride)[:, :numel])

    def weights(self, buffer: Tensor) -> Tensor:
        """Returns [world_size] FP32, the weights in the ``buffer`` of a first send."""
        return buffer.view(self._comm.world_size, -1)[:, -_WEIGHT_NUMEL:].view(torch.float32)[:, 0]


class _ReceivedGradient(GradientHandle):
    """A gradient; ``first`` is the first one of its micro-batch, which holds the weights, or None if it is this one."""

    def __init__(
        self,
        exchange: AllToAllExchange,
        number: int,
        index: int,
        buffers: tuple[Tensor, Tensor],
        arrival: Handle,
        first: _ReceivedGradient | None,
    ) -> None:
        self.number = number
        self.weights = torch.empty(0)
        self._exchange = exchange
        self._index = index
        self._buffers = buffers
        self._arrival = arrival
        self._first = first

    def wait(self) -> tuple[Sequence[Tensor], Tensor]:
        self._arrival.wait()
        _, received = self._buffers
        if self._first is None:
            self.weights = self._exchange.weights(received).clone()  # read after the buffer is given back
        return self._exchange.shards(self._index, received), (self._first or self).weights

    def release(self) -> None:
        gradient, received = self._buffers
        self._exchange.give_back(self._index, gradient)
        self._exchange.pool.give("received", received)
