"""Collectives of a single rank, which opens no socket: their results are there at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtrain.distributed.communicator import (
    Communicator,
    GradientExchange,
    GradientHandle,
    GradientSend,
    Handle,
    recorded,
    require_fp32,
)
from dtrain.distributed.schedule import CollectiveSchedule
from dtrain.distributed.transport.gradient_buffers import PrivateExchange


class Completed:
    """The handle of a collective that is complete."""

    def wait(self) -> None:
        pass


class SingleRank(Communicator):
    """Collectives of one rank, recorded like those of several."""

    def __init__(self, device: torch.device, schedule: CollectiveSchedule | None = None) -> None:
        self.rank = 0
        self.world_size = 1
        self.device = device
        self.schedule = CollectiveSchedule() if schedule is None else schedule
        self.process_group = None

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str) -> Handle:
        self.schedule.record("all_gather", label, output)
        if output.data_ptr() != shard.data_ptr():
            output.copy_(shard)
        return Completed()

    def reduce_scatter_sum(
        self, output: Tensor, flat: Tensor, *, label: str, dtype: torch.dtype = torch.float32, gathers: bool = False
    ) -> Handle:
        require_fp32("reduce_scatter_sum", flat)
        self.schedule.record("reduce_scatter_sum", label, flat)
        if output.data_ptr() != flat.data_ptr():
            output.copy_(flat)
        return Completed()

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        *,
        total: int,
        label: str,
    ) -> Handle:
        self.schedule.record("all_to_all", label, recorded(input.dtype, total))
        output.copy_(input)
        return Completed()

    def all_reduce_max(self, tensor: Tensor, *, label: str) -> Handle:
        self.schedule.record("all_reduce_max", label, tensor)
        return Completed()

    def broadcast(self, tensor: Tensor, *, src: int = 0, label: str) -> None:
        self.schedule.record("broadcast", label, tensor)

    def gather_rows(self, row: Tensor, *, label: str) -> Tensor:
        self.schedule.record("gather_rows", label, row)
        return row.unsqueeze(0)

    def exchange_text(self, text: str) -> list[str]:
        return [text]

    def gradient_exchange(self, sends: Sequence[GradientSend], num_early: int) -> GradientExchange:
        return _LocalExchange(self, sends)

    def split(self, shard_size: int) -> tuple[Communicator, Communicator]:
        raise ValueError(f"a single rank has no blocks of {shard_size} ranks")

    def sibling(self) -> Communicator:
        return SingleRank(torch.device("cpu"))


class _LocalExchange(PrivateExchange):
    def __init__(self, comm: SingleRank, sends: Sequence[GradientSend]) -> None:
        super().__init__(sends, comm.device, 1)
        self._schedule = comm.schedule
        self._weights = torch.empty(0)

    def begin(self, weight: Tensor) -> None:
        self._weights = weight.reshape(1)

    def send(self, index: int) -> GradientHandle:
        send, gradient, number = self.take_opened(index)
        self._schedule.record("all_to_all_single", send.label, gradient)
        return _LocalGradient(self, number, index, gradient, self._weights)


class _LocalGradient(GradientHandle):
    def __init__(self, exchange: _LocalExchange, number: int, index: int, gradient: Tensor, weights: Tensor) -> None:
        self.number = number
        self._exchange = exchange
        self._index = index
        self._gradient = gradient
        self._weights = weights

    def wait(self) -> tuple[Sequence[Tensor], Tensor]:
        return [self._gradient], self._weights

    def release(self) -> None:
        self._exchange.give_back(self._index, self._gradient)
