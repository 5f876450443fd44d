"""Memory layout of images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def in_layout(images: Tensor, channels_last: Any) -> Tensor:
    """Returns ``images`` [B, C, H, W] with the channels last in memory if ``channels_last`` asks for it.

    ``auto`` asks for it on a GPU in a 16-bit format, whose Tensor Cores compute convolutions in this layout.
    Convolutions give their output the layout of their input. Weights keep theirs: they are views of flat buffers.
    """
    if channels_last == "auto":
        channels_last = images.is_cuda and torch.is_autocast_enabled("cuda")
    return images.contiguous(memory_format=torch.channels_last) if channels_last else images
