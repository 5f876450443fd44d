"""Tensors over a layout: the replicas that the model computes with, and reusable leaf buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dtrain.distributed.collectives import Communicator, Pending
from dtrain.errors import ContractError
from dtrain.sharding.layout import FlatLayout, Segment, Slot


def slot_views(flat: Tensor, layout: FlatLayout) -> list[Tensor]:
    """One view a parameter, in the parameter's shape."""
    return [flat[slot.start : slot.stop].view(slot.spec.shape) for slot in layout.slots]


class ReplicaBuffer:
    """The compute replicas of one flat layout: parameters become views of one flat tensor.

    The Parameter objects stay the same, so ties, user references and hooks survive.

    Args:
        segment: this rank's slice of the layout.
        parameters: by name.
        comm: the ranks that share.

    Attributes:
        flat: the whole layout, [numel].
        own: this rank's segment, [segment.numel]: what the update casts the master into.
    """

    def __init__(self, segment: Segment, parameters: Mapping[str, nn.Parameter], comm: Communicator) -> None:
        self.layout = segment.layout
        self.parameters = [parameters[slot.spec.name] for slot in segment.layout.slots]
        self._take_over(segment, comm)
        for parameter in self.parameters:
            parameter.grad = None

    def _take_over(self, segment: Segment, comm: Communicator) -> None:
        self.flat = comm.allocate(self.layout.numel, self.layout.dtype)
        self.own = self.flat[segment.flat_start : segment.flat_start + segment.numel]
        views = slot_views(self.flat, self.layout)
        for parameter, view in zip(self.parameters, views, strict=True):
            view.copy_(parameter.detach())
        self._show(views)

    def _show(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value

    def check(self) -> None:
        """Asserts that the model still computes with this buffer.

        Raises:
            ContractError: naming the parameter that was replaced.
        """
        for parameter, slot in zip(self.parameters, self.layout.slots, strict=True):
            if not parameter.requires_grad:
                raise ContractError(
                    f"'{slot.spec.name}' was frozen after dtrain.initialize; its moments and decay would go on, "
                    f"so freeze it before, and build a new engine"
                )
        for parameter, slot in zip(self.parameters, self.layout.slots, strict=True):
            if slot.spec.numel and parameter.data_ptr() != self._address(slot):
                raise ContractError(
                    f"parameter '{slot.spec.name}' no longer lies in its flat buffer (it is {parameter.dtype} on "
                    f"{parameter.device}); do not call .to(), .half() or assign .data after dtrain.initialize"
                )

    def _address(self, slot: Slot) -> int:
        return self.flat.data_ptr() + slot.start * self.layout.dtype.itemsize


class ShardedReplica(ReplicaBuffer):
    """Compute replicas of which each rank holds its shard; the whole layout exists only between gather and free.

    Every gather has a new buffer, so what a caller still holds of an old one stays what it was. While there is none,
    ``flat`` is empty and every parameter is NaN in its own shape, at the cost of one element.
    """

    def _take_over(self, segment: Segment, comm: Communicator) -> None:
        self._comm = comm
        self._pending = Pending()
        self.own = comm.allocate(segment.numel, self.layout.dtype)
        values = {slot.spec.name: p.detach() for slot, p in zip(self.layout.slots, self.parameters, strict=True)}
        for part in segment.intervals():
            source = values[part.spec.name].reshape(-1)[part.start : part.stop]
            self.own[part.offset : part.offset + source.numel()].copy_(source)
        self._nan = self.own.new_full((), torch.nan)
        self._placeholders = [self._nan.expand(slot.spec.shape) for slot in self.layout.slots]
        self.free()

    def start_gather(self) -> None:
        """Starts the gather of all shards; all ranks call in the same order."""
        with torch.inference_mode(False):
            self.flat = self.own.new_empty(self.layout.numel)
        self._pending = self._comm.all_gather(self.flat, self.own, label=f"gather {self.layout.name}")

    def finish_gather(self) -> None:
        """Waits for the gather; the parameters become views of its result."""
        self._pending.wait()
        with torch.inference_mode(False):
            self._show(slot_views(self.flat, self.layout))

    def free(self) -> None:
        """Lets the whole go, after a gather that is under way."""
        self._pending.wait()
        self._show(self._placeholders)
        with torch.inference_mode(False):
            self.flat = self.own.new_empty(0)

    def _address(self, slot: Slot) -> int:
        return super()._address(slot) if self.flat.numel() else self._nan.data_ptr()


@dataclass(frozen=True)
class UpdateSlice:
    """A stretch of the arena with one weight-decay class; all tensors 1-D, of one length, FP32 but for the replica."""

    decayed: bool
    master: Tensor
    main_grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    replica: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Master, main grad, both moments and replica."""
        return self.master, self.main_grad, self.exp_avg, self.exp_avg_sq, self.replica


class BufferPool:
    """Flat buffers that are used again by the next group of the same layout; padding stays zero in them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[object, list[Tensor]] = {}

    def take(self, key: object, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer that was given back under ``key``, or a new one of zeros."""
        free = self._free.get((key, numel, dtype))
        return free.pop() if free else torch.zeros(numel, dtype=dtype, device=self._device)

    def give(self, key: object, buffer: Tensor) -> None:
        """Takes ``buffer`` back."""
        self._free.setdefault((key, buffer.numel(), buffer.dtype), []).append(buffer)

    def idle(self) -> list[Tensor]:
        """The buffers that nobody uses now: between steps, all of them."""
        return [buffer for free in self._free.values() for buffer in free]
