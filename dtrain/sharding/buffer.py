"""Tensors over a layout: the replicas that the model computes with, and reusable leaf buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dtrain.errors import ContractError
from dtrain.sharding.layout import FlatLayout, Segment


def slot_views(flat: Tensor, layout: FlatLayout) -> list[Tensor]:
    """One view a parameter, in the parameter's shape."""
    return [flat[slot.start : slot.stop].view(slot.spec.shape) for slot in layout.slots]


class ReplicaBuffer:
    """The compute replicas of one flat layout: parameters become views of one flat tensor.

    The Parameter objects stay the same, so ties, user references and hooks survive.
    """

    def __init__(self, layout: FlatLayout, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        self.layout = layout
        self.flat = torch.zeros(layout.numel, dtype=layout.dtype, device=device)
        self.parameters = [parameters[slot.spec.name] for slot in layout.slots]
        for parameter, view in zip(self.parameters, slot_views(self.flat, layout), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = None

    def write(self, segment: Segment, master: Tensor) -> None:
        """Casts the FP32 ``master`` of ``segment`` into its place."""
        self.flat[segment.flat_start : segment.flat_start + segment.numel].copy_(master)

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
        base, size = self.flat.data_ptr(), self.flat.element_size()
        for parameter, slot in zip(self.parameters, self.layout.slots, strict=True):
            if slot.spec.numel and parameter.data_ptr() != base + slot.start * size:
                raise ContractError(
                    f"parameter '{slot.spec.name}' no longer lies in its flat buffer (it is {parameter.dtype} on "
                    f"{parameter.device}); do not call .to(), .half() or assign .data after dtrain.initialize"
                )


@dataclass(frozen=True)
class UpdateSlice:
    """A stretch of the arena with one weight-decay class; all tensors FP32, 1-D, of one length."""

    decayed: bool
    master: Tensor
    main_grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


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
