"""Memory layout of images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def in_layout(images: Tensor, channels_last: Any, *, pays_on_cpu: bool = True) -> Tensor:
    """Returns ``images`` [B, C, H, W] with the channels last in memory if ``channels_last`` asks for it.

    ``auto`` asks for it on a GPU in a 16-bit format, whose Tensor Cores compute convolutions in this layout, and on a
    CPU if that pays: a training step of a residual network is faster by a sixth.
    Convolutions give their output the layout of their input. Weights keep theirs: they are views of flat buffers.

    Args:
        images: the input of a model.
        channels_last: ``auto``, True or False.
        pays_on_cpu: whether the model is faster in this layout on a CPU.
    """
    if channels_last == "auto":
        channels_last = torch.is_autocast_enabled("cuda") if images.is_cuda else pays_on_cpu
    if not channels_last:
        return images
    images = images.contiguous(memory_format=torch.channels_last)
    channels, height, width = images.shape[1:]
    if channels == 1:  # both layouts are the same memory, and only the strides say which one is meant
        return images.as_strided(images.shape, (height * width, 1, width, 1))
    return images
