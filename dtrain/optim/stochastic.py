"""Stochastic rounding to BF16, with random bits that follow from an element's place and the step.

A value is rounded up with a probability of its distance from the BF16 number below, and down otherwise, so that the
expected value is exact and small additions are not lost. The bits are a hash of the element's key, its index and the
step, not a generator's stream: within one engine they are the same at any sharding, on any device, eager and compiled.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# lowbias32 of C. Wellons, "Prospecting for Hash Functions" (2018): two rounds and a final shift
_SHIFTS = (16, 15, 16)
_FACTORS = (0x7FEB352D, 0x846CA68B)
_WORD = 0xFFFFFFFF

Noise = tuple[Tensor, Tensor, Tensor]
"""The results of ``stream_start`` and ``step_words`` in one tuple."""


def step_words(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns two 0-dim int32 tensors that follow from the number of the step."""
    first = _hash(step & _WORD)
    return _word(first, device), _word(_hash(first ^ 0x9E3779B9), device)


def stream_start(key: int, index: int, device: torch.device) -> Tensor:
    """Returns the 0-dim int32 place of element ``index`` of what has the name ``key``, modulo 2^32."""
    return _word(_hash(key & _WORD) + index, device)


def random_bits(noise: Noise, like: Tensor) -> Tensor:
    """Returns 32 random bits for each element of ``like``, as int32.

    Args:
        noise: of the first element.
        like: fewer than 2^31 elements, numbered row by row.
    """
    start, *words = noise
    # in place where it can be: eagerly, temporaries are what this costs
    bits = torch.arange(like.numel(), dtype=torch.int32, device=like.device).view(like.shape).add_(start)
    for word, shift, factor in zip(words, _SHIFTS, _FACTORS, strict=False):
        bits ^= word
        bits = _shifted(bits, shift).bitwise_xor_(bits).mul_(_signed(factor))
    return _shifted(bits, _SHIFTS[2]).bitwise_xor_(bits)


def round_to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """Returns FP32 ``values`` rounded to BF16 by ``bits``, random integers from 0 to 65535.

    BF16 is the upper half of an FP32 number, so the sum carries into it with the probability that is wanted. A BF16
    number, Inf and NaN stay; a value beyond the largest BF16 number may become Inf, its upper neighbor.
    """
    rounded = (values.view(torch.int32) + bits).bitwise_and_(-0x10000).view(torch.float32)
    # the bits of a NaN may carry into its sign: it is put back by a maximum, with -Inf for other values
    return torch.maximum(rounded, values.clamp(max=-math.inf)).to(torch.bfloat16)


def _shifted(values: Tensor, shift: int) -> Tensor:
    # of int32 the sign is shifted in
    return (values >> shift).bitwise_and_(_WORD >> shift)


def _hash(value: int) -> int:
    """Returns lowbias32 of a word."""
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        value = ((value ^ value >> shift) * factor) & _WORD
    return value ^ value >> _SHIFTS[2]


def _signed(word: int) -> int:
    """Returns the int32 with the bits of ``word``."""
    return (word & _WORD ^ 0x80000000) - 0x80000000


def _word(word: int, device: torch.device) -> Tensor:
    return torch.full((), _signed(word), dtype=torch.int32, device=device)
