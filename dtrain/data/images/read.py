"""Reads an image file for a trained model."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from dtrain.data.images.decode import ImageError, decode
from dtrain.data.images.pictures import standardize_pixels
from dtrain.errors import ConfigError, DataError, one_line
from dtrain.tasks import Task

_CHANNELS = {1: "gray", 3: "rgb"}


def read_image(path: str | os.PathLike[str], task: Task) -> Tensor:
    """Returns an image file as a model of ``task`` takes it, prepared as ``data=images`` prepares those of validation.

    The largest square in the middle, turned as Exif states, resized, and standardized. What is transparent is white.

    Args:
        path: of the file.
        task: of a model that was trained on images.

    Returns:
        FP32 [C, S, S].

    Raises:
        ConfigError: the task has no square images of one or three channels.
        DataError: the file is missing, damaged or of an unknown format.
    """
    shape = task.input_shape
    if not task.is_image or len(shape) != 3 or shape[0] not in _CHANNELS or shape[1] != shape[2]:
        raise ConfigError(
            f"read_image prepares square images, but the inputs of this task of {task.name} are "
            f"{'images' if task.is_image else 'numbers'} of shape {list(shape)}; prepare them as its data does"
        )
    channels, size, _ = shape
    try:
        data = decode(os.path.expanduser(os.fspath(path)), (), size, _CHANNELS[channels])
    except ImageError as error:
        raise DataError(one_line(str(error))) from None
    pixels = np.frombuffer(data, np.uint8).reshape(size, size, channels).transpose(2, 0, 1) * np.float32(1 / 255)
    standardize_pixels(pixels, task)
    return torch.from_numpy(np.ascontiguousarray(pixels))
