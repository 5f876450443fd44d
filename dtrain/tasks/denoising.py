"""Denoising: a diffusion model, which tells images from noise, and images drawn from noise at the end.

Ho et al., "Denoising Diffusion Probabilistic Models" (2020): an image x becomes sqrt(a) x + sqrt(1 - a) e with Gaussian
noise e. The model predicts sqrt(a) e - sqrt(1 - a) x, the velocity of Salimans and Ho, "Progressive Distillation for
Fast Sampling of Diffusion Models" (2022), appendix D, because e alone says little about x where a is almost 0. The
signal's share ``a`` of each time follows the cosine of Nichol and Dhariwal, "Improved Denoising Diffusion Probabilistic
Models" (2021), section 3.2. Images are drawn without fresh noise between steps: Song et al., "Denoising Diffusion
Implicit Models" (2021), equation 12 with sigma = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.tasks.task import Sample, SampleOptions, Task, Validation, require_shape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dtrain.engine.interface import Engine

_DRAWN_STEPS = 50
_MOST_IMAGES = 64
_LEAST_COLUMNS, _MOST_COLUMNS = 8, 16
_SIDE = 10.0  # of the picture, in inches
_BORDER = 1  # pixels between images
_LEAST_SIGNAL = 1e-4  # of the last time; exactly none would divide by zero


def signal_shares(num_times: int) -> Tensor:
    """Returns the share of the signal's variance at each time, FP32 [num_times], from almost 1 to almost 0."""
    times = torch.arange(1, num_times + 1, dtype=torch.float64) / num_times
    offset = 0.008

    def cosine(time: Tensor) -> Tensor:
        return torch.cos((time + offset) / (1 + offset) * math.pi / 2).square()

    return (cosine(times) / cosine(torch.zeros((), dtype=torch.float64))).clamp(_LEAST_SIGNAL, 1.0).float()


def add_noise(images: Tensor, noise: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``images`` [B, C, H, W] with ``noise`` of the same shape at signal shares [B], and their velocity."""
    signal, rest = shares.sqrt().view(-1, 1, 1, 1), (1 - shares).sqrt().view(-1, 1, 1, 1)
    return signal * images + rest * noise, signal * noise - rest * images


@dataclass(frozen=True)
class Denoising(Task):
    """Mean squared error of the predicted velocity.

    A batch has ``noisy`` FP32 [B, C, H, W], ``times`` int64 [B] below ``num_times``, ``classes`` int64 [B], and
    ``targets``, the velocity, FP32 [B, C, H, W].

    Attributes:
        labels: names of the classes.
        input_shape: shape of one image, [C, H, W], with values in [-1, 1].
        num_times: times between the image and noise.
    """

    name = "denoising"
    labels: tuple[str, ...]
    input_shape: tuple[int, ...]
    num_times: int = 1000

    is_image = True

    @property
    def num_outputs(self) -> int:  # type: ignore[override]
        return len(self.labels)

    @property
    def input_mean(self) -> tuple[float, ...]:  # type: ignore[override]
        return (0.5,) * self.input_shape[0]

    @property
    def input_std(self) -> tuple[float, ...]:  # type: ignore[override]
        return (0.5,) * self.input_shape[0]

    def loss(self, prediction: Tensor, targets: Tensor) -> Tensor:
        require_shape(prediction, targets.shape, "the velocity of each pixel")
        return F.mse_loss(prediction, targets)

    def describe(self, batch: dict[str, Tensor]) -> list[str]:
        pairs = zip(batch["classes"].tolist(), batch["times"].tolist(), strict=True)
        return [f"{self.labels[label]} at time {time}" for label, time in pairs]

    def sample(self, engine: Engine, validation: Validation, options: SampleOptions) -> Sample:
        """Returns images drawn from noise, one or more of each class."""
        # a class has columns of its own, unless there are too many
        columns = min(math.ceil(_LEAST_COLUMNS / self.num_outputs) * self.num_outputs, _MOST_COLUMNS)
        num = _MOST_IMAGES // columns * columns
        classes = torch.arange(num) % self.num_outputs
        images = draw(engine, self, classes, torch.Generator().manual_seed(options.seed))
        named = ", ".join(self.labels[label] for label in classes[: self.num_outputs].tolist())
        return Sample(f"{num} images drawn from noise, of the classes {named}", _figure(images, columns))


def draw(
    engine: Engine, task: Denoising, classes: Tensor, generator: torch.Generator, num_steps: int = _DRAWN_STEPS
) -> Tensor:
    """Returns an image of each of ``classes`` [B], FP32 [B, C, H, W] in [-1, 1] in host memory; all ranks call.

    They are of the averaged weights, if the engine keeps an average.
    """
    averaged = engine.ema() if engine.ema_decay is not None else nullcontext()
    with averaged, engine.eval():
        return draw_images(
            lambda noisy, times, classes: engine(noisy=noisy, times=times, classes=classes).prediction,
            *(task, classes.to(engine.device), generator, num_steps),
        ).cpu()


@torch.no_grad()
def draw_images(
    predict: Callable[[Tensor, Tensor, Tensor], Tensor],
    task: Denoising,
    classes: Tensor,
    generator: torch.Generator,
    num_steps: int = _DRAWN_STEPS,
) -> Tensor:
    """Returns an image of each of ``classes`` [B], FP32 [B, C, H, W] in [-1, 1], on their device.

    Args:
        predict: maps noisy images, times and classes to the velocity, as ``Denoising`` states.
        task: of the model.
        classes: int64 [B].
        generator: of the noise, on the CPU.
        num_steps: forwards of the model.
    """
    device = classes.device
    shares = signal_shares(task.num_times).to(device)
    times = torch.linspace(task.num_times - 1, 0, num_steps, device=device).round().long()
    # drawn on the CPU, so that all devices begin with the same noise
    images = torch.randn(len(classes), *task.input_shape, generator=generator).to(device)
    for step, time in enumerate(times):
        velocity = predict(images, time.expand(len(classes)), classes)
        share = shares[time]
        clean: Tensor = (share.sqrt() * images - (1 - share).sqrt() * velocity).clamp(-1, 1)
        if step + 1 == len(times):
            break
        # the noise that fits the clamped image
        noise = (images - share.sqrt() * clean) / (1 - share).sqrt()
        following = shares[times[step + 1]]
        images = following.sqrt() * clean + (1 - following).sqrt() * noise
    return clean


def _figure(images: Tensor, columns: int) -> Figure:
    from matplotlib.figure import Figure  # it takes half a second to import

    padded = F.pad(images, (0, _BORDER, 0, _BORDER), value=1.0)
    _, channels, height, width = padded.shape
    rows = len(images) // columns
    grid = padded.view(rows, columns, channels, height, width).permute(0, 3, 1, 4, 2)
    pixels = ((grid.reshape(rows * height, columns * width, channels) + 1) / 2).numpy()
    across, down = columns * width, rows * height
    scale = _SIDE / max(across, down)
    figure = Figure(figsize=(scale * across, scale * down), dpi=100)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.imshow(pixels.squeeze(-1) if channels == 1 else pixels, cmap="gray", vmin=0, vmax=1)
    axes.axis("off")
    return figure
