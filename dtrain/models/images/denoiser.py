"""A small U-Net that tells images from noise, as ``model=denoiser``.

The network of Ho et al., "Denoising Diffusion Probabilistic Models" (2020), appendix B, at the size of small images: it
halves height and width twice, and each block is told the time and the class. It has no self-attention, which did not
lower the loss on images of 16 x 16 pixels.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.config.model import ModelConfig
from dtrain.errors import ConfigError
from dtrain.models.images.layout import in_layout
from dtrain.models.task_shapes import image_shape
from dtrain.tasks import Denoising, Task

_WIDTHS = (1, 2, 4)  # channels of the levels, in hidden_dim
_SIZE_MULTIPLE = 1 << (len(_WIDTHS) - 1)  # pixels, of which the last level keeps one
_NORM_GROUPS = 8
_LONGEST_PERIOD = 10_000.0


class NoiseBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, [B, in_channels, H, W] to [B, out_channels, H, W].

    Scale and shift of the second norm depend on time and class (Dhariwal and Nichol, 2021, section 3).
    """

    def __init__(self, in_channels: int, out_channels: int, condition_dim: int) -> None:
        super().__init__()
        self.norm1 = _norm(in_channels)
        self.conv1 = _conv(in_channels, out_channels)
        self.condition = nn.Linear(condition_dim, 2 * out_channels)
        self.norm2 = _norm(out_channels)
        self.conv2 = _zeroed(_conv(out_channels, out_channels))
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        change = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.condition(condition)[:, :, None, None].chunk(2, dim=1)
        change = self.norm2(change) * (1 + scale) + shift
        out: Tensor = self.shortcut(x) + self.conv2(F.silu(change))
        return out


class Downsample(nn.Module):
    """A 3x3 convolution to half of height and width."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = _conv(in_channels, out_channels, stride=2)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return out


class Upsample(nn.Module):
    """A 3x3 convolution whose pixels become squares of 2 x 2; the blocks behind it smooth them."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = _conv(in_channels, out_channels)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return F.interpolate(self.conv(x), scale_factor=2.0, mode="nearest")


class Denoiser(nn.Module):
    """Predicts the velocity of noisy images of a class at a time (``dtrain.tasks.denoising``).

    Three levels with 1, 2 and 4 times ``hidden_dim`` channels at 1, 1/2 and 1/4 of the size: blocks on the way down,
    two at the last level, and blocks on the way up that also read those on the way down.

    Args:
        task: its images, classes and times.
        hidden_dim: channels of the first level, a multiple of 8.
        num_layers: blocks of a level on each way.
        channels_last: see ``dtrain.models.images.layout.in_layout``.
    """

    def __init__(self, task: Denoising, hidden_dim: int, num_layers: int, channels_last: Any = "auto") -> None:
        super().__init__()
        channels, dim = task.input_shape[0], 4 * hidden_dim
        widths = [multiple * hidden_dim for multiple in _WIDTHS]
        self.hidden_dim = hidden_dim
        self.num_times = task.num_times
        self.channels_last = channels_last
        self.time = nn.Linear(hidden_dim, dim)
        self.time_out = nn.Linear(dim, dim)
        self.classes = nn.Embedding(task.num_outputs, dim)
        self.stem = _conv(channels, hidden_dim)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for width, below in pairwise(widths):
            self.down.extend(NoiseBlock(width, width, dim) for _ in range(num_layers))
            self.down.append(Downsample(width, below))
        last = widths[-1]
        self.middle = nn.ModuleList(NoiseBlock(last, last, dim) for _ in range(2))
        for below, width in pairwise(reversed(widths)):
            self.up.append(Upsample(below, width))
            self.up.extend(NoiseBlock(2 * width, width, dim) for _ in range(num_layers))
        self.norm = _norm(hidden_dim)
        self.head = _zeroed(_conv(hidden_dim, channels))

    def forward(self, noisy: Tensor, times: Tensor, classes: Tensor) -> Tensor:
        """Returns the velocity [B, C, H, W] of ``noisy`` of that shape.

        Args:
            noisy: images with noise.
            times: int64 [B], below ``num_times``.
            classes: int64 [B].
        """
        time = self.time_out(F.silu(self.time(self._waves(times))))
        condition = F.silu(time + self.classes(classes))
        # on a CPU the norms lose what the convolutions gain
        x = self.stem(in_layout(noisy, self.channels_last, pays_on_cpu=False))
        kept = []
        for block in self.down:
            x = block(x, condition)
            if isinstance(block, NoiseBlock):
                kept.append(x)
        for block in self.middle:
            x = block(x, condition)
        for block in self.up:
            x = block(torch.cat((x, kept.pop()), dim=1) if isinstance(block, NoiseBlock) else x, condition)
        out: Tensor = self.head(F.silu(self.norm(x)))
        return out

    def _waves(self, times: Tensor) -> Tensor:
        """Returns sines and cosines of ``times`` at periods from 2 pi to ``_LONGEST_PERIOD``, [B, hidden_dim]."""
        half = self.hidden_dim // 2
        exponents = torch.arange(half, device=times.device, dtype=torch.float32) / half
        # in thousandths of the way to noise, so that the periods suit any number of times
        phases = (times.float() * (1000 / self.num_times))[:, None] * _LONGEST_PERIOD**-exponents
        return torch.cat((phases.sin(), phases.cos()), dim=1)


def build(config: ModelConfig, task: Task) -> Denoiser:
    """Builds the network for the images, classes and times of ``task``.

    Raises:
        ConfigError: the task is no denoising, height or width do not divide by 4, or ``hidden_dim`` not by 8.
    """
    if not isinstance(task, Denoising):
        raise ConfigError(f"model=denoiser is for denoising, but the task of the data is {task.name}; choose denoising")
    if config.hidden_dim % _NORM_GROUPS:
        raise ConfigError(
            f"model.hidden_dim={config.hidden_dim} does not divide by {_NORM_GROUPS}, the groups of channels in the "
            "norms of model=denoiser"
        )
    image_shape(task, "model=denoiser", multiple=_SIZE_MULTIPLE)
    return Denoiser(task, config.hidden_dim, config.num_layers, config.channels_last)


def _conv(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1)


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(_NORM_GROUPS, channels)


def _zeroed(layer: Any) -> Any:
    """Sets the parameters of ``layer`` to zero, so that what it is added to passes unchanged at first."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer
