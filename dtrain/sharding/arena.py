"""This rank's arena: one contiguous tensor for each kind of FP32 state, of which the flat buffers take views."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.distributed.communicator import GradientExchange
from dtrain.sharding.layout import ArenaSegment


@dataclass(frozen=True)
class Arena:
    """The tensors behind the flat buffers.

    Attributes:
        states: FP32 or another dtype, each [elements of all segments], by name.
        grads: FP32, the gradients that this rank accumulates or owns.
        exchange: holds unreduced gradients, if they are sent.
    """

    states: Mapping[str, Tensor]
    grads: Tensor
    exchange: GradientExchange | None

    def unreduced(self) -> list[Tensor]:
        """Returns the memory of unreduced gradients."""
        return [] if self.exchange is None else self.exchange.idle()


def split(whole: Tensor, segments: Sequence[ArenaSegment]) -> Iterator[Tensor]:
    """Yields the elements of ``whole`` [elements of all segments] that belong to each segment."""
    yield from torch.split(whole, [segment.numel for segment in segments])
