"""Flips one bit of a tensor as a memory fault does: no operation of torch, no version counter."""

from __future__ import annotations

import ctypes

from torch import Tensor


def flip_bit(tensor: Tensor, element: int, bit: int) -> None:
    """Flips ``bit`` of the element at that row-major position of a contiguous CPU tensor."""
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    assert 0 <= element < tensor.numel()
    address = tensor.data_ptr() + element * tensor.element_size() + bit // 8
    ctypes.c_uint8.from_address(address).value ^= 1 << bit % 8
