"""FP32 numbers held as a BF16 number and a 16-bit remainder, so that a compute replica is one half of its master.

The upper 16 bits of an FP32 number are a BF16 number, and rounding to the nearest one adds 1 to them if the lower 16
bits are 0x8000 or more. The pair is::

    weight    = (bits + 0x8000) >> 16      the nearest BF16 number
    remainder = bits & 0xFFFF              read as int16, whose sign takes the 1 back
    bits      = (weight << 16) + remainder

It is exact for every FP32 number: normal, subnormal, -0 and Inf, also for those beyond the largest BF16 number, which
round to Inf. A NaN stays a NaN; its other bits are not kept. Transformer Engine's FusedAdam holds masters in
this form (``store_param_remainders``).

[Note: ties] Of two BF16 numbers that are equally near, the pair takes the one of the larger magnitude, where torch's
cast takes the even one. They differ for one number in 131,072. No pair of 32 bits with the even one would be exact:
65,537 FP32 numbers round to each even BF16 number, and 16 bits tell 65,536 apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from dtrain.precision.fake import block_starts, is_fake

REMAINDER = torch.int16
"""Dtype of a remainder."""

_BLOCK = {"cpu": 1 << 17}  # elements that are joined or split at a time: the temporaries stay in a core's cache
_LARGE_BLOCK = 1 << 24  # on other devices: temporaries of at most 64 MiB
QUIET_NAN = 0x7FC00000
"""Bits of the one NaN that a pair holds."""


def join(weight_bits: Tensor, remainder: Tensor) -> Tensor:
    """Returns FP32 numbers; ``weight_bits`` are BF16 numbers viewed as int16."""
    return ((weight_bits.to(torch.int32) << 16) + remainder).view(torch.float32)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bits of the BF16 number and the remainder of each FP32 number, both int16."""
    bits = _quiet(values)
    # the sum overflows only for a NaN; shifted back with its sign, because a cast to int16 might saturate
    return ((bits + 0x8000) >> 16).to(REMAINDER), ((bits << 16) >> 16).to(REMAINDER)


def _quiet(values: Tensor) -> Tensor:
    """Returns the bits of ``values``, int32, with one NaN for all."""
    return torch.where(values.isnan(), QUIET_NAN, values.view(torch.int32))


@dataclass(frozen=True)
class RemainderPair:
    """FP32 numbers [n], without memory of their own for them.

    Attributes:
        weight: BF16 [n]; a compute replica, which is written with the numbers.
        remainder: int16 [n].
    """

    weight: Tensor
    remainder: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the numbers."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """Device of both halves."""
        return self.remainder.device

    @property
    def bits(self) -> tuple[Tensor, Tensor]:
        """Both halves as int16: what ``join`` takes and ``split`` returns."""
        return self.weight.view(REMAINDER), self.remainder

    def numel(self) -> int:
        """Returns n."""
        return self.remainder.numel()

    def __getitem__(self, part: slice) -> RemainderPair:
        return RemainderPair(self.weight[part], self.remainder[part])

    def read(self) -> Tensor:
        """Returns the numbers, FP32 [n], in new memory."""
        values = torch.empty(self.numel(), device=self.device)
        bits = values.view(torch.int32)
        for block in _blocks(values):
            weight_bits, remainder = self[block].bits
            bits[block].copy_(weight_bits).mul_(1 << 16).add_(remainder)  # what `join` does, in place
        return values

    def write(self, values: Tensor) -> None:
        """Takes over ``values``, FP32 [n]."""
        for block in _blocks(self.remainder):
            for own, new in zip(self[block].bits, _split_quickly(values[block]), strict=True):
                own.copy_(new)  # from int32 it takes the lower 16 bits


def _blocks(tensor: Tensor) -> list[slice]:
    size = _BLOCK.get(tensor.device.type, _LARGE_BLOCK)
    return [slice(start, start + size) for start in block_starts(tensor, size)]


def _split_quickly(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what ``split`` does, as int32 whose upper 16 bits are to be dropped."""
    # eagerly on a CPU, to search for a NaN costs more than all else, and a sum shows that there is none
    is_host = values.device.type == "cpu" and not is_fake(values)
    bits = values.view(torch.int32) if is_host and math.isfinite(values.sum()) else _quiet(values)
    return (bits + 0x8000).bitwise_right_shift_(16), bits


Numbers: TypeAlias = Tensor | RemainderPair
"""FP32 numbers in one tensor, or as a pair."""


def read(numbers: Numbers) -> Tensor:
    """Returns FP32 [n]: the tensor itself, or the values of a pair in new memory."""
    return numbers if isinstance(numbers, Tensor) else numbers.read()


def write(numbers: Numbers, values: Tensor) -> None:
    """Overwrites ``numbers`` with ``values``."""
    if isinstance(numbers, Tensor):
        numbers.copy_(values)
    else:
        numbers.write(values)
