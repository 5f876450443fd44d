"""Pictures by their id, and the samples of a task that are made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtrain.data.dataset import SampleSource
from dtrain.data.draws import NOISE, drawn_ids, generator, spread
from dtrain.data.sampling import Indices
from dtrain.tasks import Classification, Denoising, Task
from dtrain.tasks.denoising import add_noise, signal_shares

Pixels = NDArray[np.float32]


class Pictures(ABC):
    """Pictures of classes.

    An id is that of ``dtrain.data.draws.drawn_ids``: the draw decides how a picture is changed at random.
    """

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Number of samples."""

    @abstractmethod
    def read(self, ids: Indices) -> tuple[Pixels, Indices]:
        """Returns pictures FP32 [B, C, S, S] with values in [0, 1], and their classes int64 [B]."""

    def file(self, sample_id: int) -> str:
        """Returns the name of a picture's file; empty if it has none."""
        return ""


def standardize_pixels(pixels: Pixels, task: Task) -> None:
    """Standardizes ``pixels`` [..., C, S, S] in [0, 1] in place, as ``task`` states."""
    pixels -= np.array(task.input_mean, np.float32)[:, None, None]
    pixels *= np.array([1 / std for std in task.input_std], np.float32)[:, None, None]


@dataclass(frozen=True)
class PictureSet:
    """Pictures to train on and to validate on.

    Attributes:
        labels: names of the classes.
        shape: of one picture, [C, S, S].
        mean: subtracted from a pixel to classify.
        std: by which it is divided then.
        fingerprint: see ``dtrain.data.dataset.Dataset``.
        description: one line about the source and the validation split.
    """

    train: Pictures
    validation: Pictures
    labels: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: float
    std: float
    fingerprint: str
    description: str


@dataclass(frozen=True, eq=False)
class _PictureSamples(SampleSource):
    pictures: Pictures
    is_drawn: bool

    @property
    def num_samples(self) -> int:
        return self.pictures.num_samples

    def order(self, seed: int, indices: Indices) -> Indices:
        return drawn_ids(seed, indices, self.num_samples) if self.is_drawn else super().order(seed, indices)

    def file(self, sample_id: int) -> str:
        return self.pictures.file(sample_id)


@dataclass(frozen=True, eq=False)
class ClassifiedPictures(_PictureSamples):
    """Batches of ``dtrain.tasks.Classification``: ``inputs`` (pixel - mean) / std, ``targets`` the classes.

    Attributes:
        is_drawn: pictures change at random, in each epoch in another way.
    """

    task: Classification

    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        pixels, classes = self.pictures.read(sample_ids)
        standardize_pixels(pixels, self.task)
        return {"inputs": torch.from_numpy(pixels), "targets": torch.from_numpy(classes)}


@dataclass(frozen=True, eq=False)
class NoisyPictures(_PictureSamples):
    """Batches of ``dtrain.tasks.Denoising``: pixels in [-1, 1] with noise.

    Attributes:
        is_drawn: pictures, noise and times differ in each epoch; otherwise times are evenly spread over samples.
    """

    task: Denoising

    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        pixels, classes = self.pictures.read(sample_ids)
        standardize_pixels(pixels, self.task)
        noise = np.empty_like(pixels)
        times = spread(sample_ids, self.task.num_times)
        for row, sample in enumerate(sample_ids):
            rng = generator(sample, NOISE)
            rng.standard_normal(dtype=np.float32, out=noise[row])
            if self.is_drawn:
                times[row] = rng.integers(self.task.num_times)
        at = torch.from_numpy(times)
        shares = signal_shares(self.task.num_times)[at]
        noisy, targets = add_noise(torch.from_numpy(pixels), torch.from_numpy(noise), shares)
        return {"noisy": noisy, "times": at, "classes": torch.from_numpy(classes), "targets": targets}
