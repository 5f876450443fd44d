"""A residual network for small images (He et al., 2016, section 4.2), as ``model=convnet``."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.config.model import ModelConfig
from dtrain.models.images.layout import in_layout
from dtrain.models.task_shapes import image_shape, padded_outputs
from dtrain.tasks import Task

_STAGES = 3
_LEAST_SIZE = 1 << (_STAGES - 1)  # pixels, of which the last stage keeps one


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, [B, in_channels, H, W] to [B, out_channels, H / stride, W / stride].

    The weight of the last norm begins at one, not at zero as in deep networks (Goyal et al., 2017): with few blocks
    zero only delays the first steps.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, out_channels, stride)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = _conv(out_channels, out_channels)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.projects = stride > 1 or in_channels != out_channels
        if self.projects:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            self.shortcut_norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        change = F.relu(self.norm1(self.conv1(x)))
        change = self.norm2(self.conv2(change))
        return F.relu((self.shortcut_norm(self.shortcut(x)) if self.projects else x) + change)


class ConvNet(nn.Module):
    """Predicts ``num_outputs`` numbers of an image.

    A 3x3 convolution, three stages of residual blocks with 1, 2 and 4 times ``hidden_dim`` channels at 1, 1/2 and 1/4
    of the size, the mean over the pixels, and a Linear layer.

    Args:
        channels: of the images.
        num_outputs: classes, or target values.
        hidden_dim: channels of the first stage.
        num_layers: residual blocks of each stage.
        channels_last: see ``dtrain.models.images.layout.in_layout``.
    """

    def __init__(
        self, channels: int, num_outputs: int, hidden_dim: int, num_layers: int, channels_last: Any = "auto"
    ) -> None:
        super().__init__()
        self.num_outputs = num_outputs
        self.channels_last = channels_last
        self.stem = _conv(channels, hidden_dim)
        self.stem_norm = nn.BatchNorm2d(hidden_dim)
        self.blocks = nn.ModuleList()
        width = hidden_dim
        for stage in range(_STAGES):
            for layer in range(num_layers):
                out_width = hidden_dim << stage
                self.blocks.append(ResidualBlock(width, out_width, stride=2 if stage and not layer else 1))
                width = out_width
        self.head = nn.Linear(width, padded_outputs(num_outputs))

    def forward(self, images: Tensor) -> Tensor:
        """Returns the prediction [B, num_outputs] for ``images`` [B, channels, H, W]."""
        x = F.relu(self.stem_norm(self.stem(in_layout(images, self.channels_last))))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean(dim=(2, 3)))
        return out[:, : self.num_outputs]


def build(config: ModelConfig, task: Task) -> ConvNet:
    """Builds the network for the images and outputs of ``task``.

    Raises:
        ConfigError: the data are no images, or smaller than 4 x 4 pixels.
    """
    channels, _, _ = image_shape(task, "model=convnet", least=_LEAST_SIZE)
    return ConvNet(channels, task.num_outputs, config.hidden_dim, config.num_layers, config.channels_last)


def _conv(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
