"""Small networks with their data: what the experiments train. Data are drawn from a seed; nothing is downloaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from dtrain.config.data import StdlibDataConfig
from dtrain.config.model import ModelConfig
from dtrain.config.optim import AdamW, Optimizer
from dtrain.data import SampleSource, load_dataset
from dtrain.data.text import VOCAB_SIZE
from dtrain.models.transformer import build


@dataclass(frozen=True)
class SmallNetwork:
    """A model, its data, its loss and its optimizer.

    Attributes:
        build: returns the model, drawn from torch's generator.
        draw: returns inputs and targets of one batch.
        loss: FP32 loss of the model's output and the targets.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Any, Tensor], Tensor]
    optimizer: Optimizer


# -- language model: dtrain's transformer on the text of Python's standard library -------------------------------------

_LANGUAGE = ModelConfig(num_layers=2, hidden_dim=32, num_heads=2, max_seq_len=32)
_SEQUENCES = 8


def language_model() -> SmallNetwork:
    model = partial(build, _LANGUAGE, VOCAB_SIZE)
    return SmallNetwork("language model", model, _draw_text, _cross_entropy, AdamW(lr=3e-3))


def _draw_text(generator: Generator) -> tuple[Tensor, Tensor]:
    text = _text()
    batch = text.batch(torch.randint(text.num_samples, (_SEQUENCES,), generator=generator).numpy())
    return batch["tokens"], batch["targets"]


@cache
def _text() -> SampleSource:
    return load_dataset(StdlibDataConfig(), _LANGUAGE.max_seq_len).train


def _cross_entropy(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


# -- convnet: tells noisy shapes apart ---------------------------------------------------------------------------------

_SIDE = 16
_IMAGES = 32
_SHAPES = 4


def convnet() -> SmallNetwork:
    return SmallNetwork("convnet", _classifier, _draw_shapes, F.cross_entropy, AdamW(lr=2e-3))


def _classifier() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(_SIDE * _SIDE, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()),
        nn.Linear(64, _SHAPES),
    )


def _draw_shapes(generator: Generator) -> tuple[Tensor, Tensor]:
    """Returns images [B, 1, 16, 16] of a disc, ring, square or cross each, anywhere and of any size, and kinds [B]."""
    kinds = torch.randint(_SHAPES, (_IMAGES,), generator=generator)
    dy, dx = _offsets(5 + 6 * torch.rand(_IMAGES, 2, generator=generator))
    radii = 2.5 + 2 * torch.rand(_IMAGES, 1, 1, generator=generator)
    distance, width = torch.hypot(dx, dy), torch.maximum(dx.abs(), dy.abs())
    disc, square = distance < radii, width < radii
    ring, cross = disc & (distance > radii - 1.5), square & (torch.minimum(dx.abs(), dy.abs()) < 1)
    shapes = torch.stack((disc, ring, square, cross))[kinds, torch.arange(_IMAGES)]
    return _noisy(shapes, 0.3, generator), kinds


def _offsets(centers: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each pixel's distance down and right from ``centers`` [B, 2]: [B, 16, 16] each."""
    grid = torch.arange(_SIDE, dtype=torch.float32)
    down, right = grid[:, None] - centers[:, :1, None], grid - centers[:, 1:, None]
    return down.expand(-1, _SIDE, _SIDE), right.expand(-1, _SIDE, _SIDE)


def _noisy(shapes: Tensor, noise: float, generator: Generator) -> Tensor:
    return (shapes.float() + noise * torch.randn(shapes.shape, generator=generator))[:, None]


# -- detector: finds one object, in SI units ---------------------------------------------------------------------------

_PIXEL = 0.25e-3
"""Meters: the image is four millimeters wide."""
_DISCS = 16


class Detector(nn.Module):
    """Finds the center and the radius of a disc in an image, in meters: convolutions without norms, as in VGG."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(_SIDE * _SIDE, 64), nn.ReLU()),
            nn.Linear(64, 3),
        )
        products = [layer for layer in self.layers if isinstance(layer, (nn.Conv2d, nn.Linear))]
        for layer in products:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        nn.init.normal_(products[-1].weight, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images [B, 1, 16, 16] to [B, 3]; the layers compute in pixels, the result is in meters."""
        pixels: Tensor = self.layers(images)
        return _PIXEL * pixels.float()


def detector() -> SmallNetwork:
    """The loss is in square meters: about 1e-7. AdamW's eps is far below such gradients."""
    return SmallNetwork("detector", Detector, _draw_discs, F.mse_loss, AdamW(lr=2e-3, eps=1e-12, weight_decay=0.0))


def _draw_discs(generator: Generator) -> tuple[Tensor, Tensor]:
    centers = 4 + 8 * torch.rand(_DISCS, 2, generator=generator)
    radii = 2 + 2 * torch.rand(_DISCS, 1, generator=generator)
    discs = torch.hypot(*_offsets(centers)) < radii[..., None]
    targets = torch.cat((centers - 8, radii - 3), dim=1)
    return _noisy(discs, 0.3, generator), _PIXEL * targets


DETECTOR_VARIANCE = _PIXEL**2 * (2 * 8**2 / 12 + 2**2 / 12) / 3
"""Mean variance of the detector's targets: the loss of the best constant answer."""


# -- regression: a multilayer perceptron ------------------------------------------------------------------------------

_POINTS = 256


def regression() -> SmallNetwork:
    return SmallNetwork("regression", _perceptron, _draw_points, F.mse_loss, AdamW(lr=2e-3))


def _perceptron() -> nn.Module:
    hidden = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(nn.Linear(5, 64), nn.GELU(), *hidden, nn.Linear(64, 1))


def _draw_points(generator: Generator) -> tuple[Tensor, Tensor]:
    """Returns points [B, 5] and Friedman's first test function there [B, 1], with mean 0 and standard deviation 1."""
    x = torch.rand(_POINTS, 5, generator=generator)
    a, b, c, d, e = x.unbind(1)
    y = 10 * torch.sin(math.pi * a * b) + 20 * (c - 0.5) ** 2 + 10 * d + 5 * e
    return 2 * x - 1, ((y - 14.4) / 4.9)[:, None]
