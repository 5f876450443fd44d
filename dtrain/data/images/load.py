"""Opens images as samples of their task."""

from __future__ import annotations

from collections.abc import Callable

from dtrain.config.data import GlyphsDataConfig, ImagesDataConfig
from dtrain.data.dataset import Dataset, SampleSource
from dtrain.data.images.folder import open_folder
from dtrain.data.images.glyphs import open_glyphs
from dtrain.data.images.pictures import ClassifiedPictures, NoisyPictures
from dtrain.tasks import Classification, Denoising, Task


def load_images(config: ImagesDataConfig | GlyphsDataConfig, on_progress: Callable[[], None] = lambda: None) -> Dataset:
    """Opens the images that ``config`` names.

    Args:
        on_progress: called now and then.

    Raises:
        ConfigError: a folder is missing or does not hold a folder of images for each of at least two classes, or the
            classes of validation are others.
    """
    opened = open_glyphs(config) if isinstance(config, GlyphsDataConfig) else open_folder(config, on_progress)
    task: Task
    train: SampleSource
    validation: SampleSource
    if config.task == "denoising":
        task = Denoising(opened.labels, opened.shape)
        train = NoisyPictures(opened.train, True, task)
        validation = NoisyPictures(opened.validation, False, task)
    else:
        channels = opened.shape[0]
        mean, std = (opened.mean,) * channels, (opened.std,) * channels
        task = Classification(opened.labels, opened.shape, input_mean=mean, input_std=std, is_image=True)
        train = ClassifiedPictures(opened.train, True, task)
        validation = ClassifiedPictures(opened.validation, False, task)
    return Dataset(train, validation, opened.fingerprint, opened.description, task)
