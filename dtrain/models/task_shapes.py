"""Sizes of a model that follow from the task: the shape of its images, and the width of its head."""

from __future__ import annotations

from dtrain.errors import ConfigError
from dtrain.sharding.layout import round_up
from dtrain.tasks import Task

HEAD_MULTIPLE = 16
"""Multiple to which the outputs of a head are padded: FP8 products need it, and Tensor Cores are faster with it."""


def padded_outputs(num_outputs: int) -> int:
    """Returns the width of a head for ``num_outputs`` numbers; its model cuts off the padding."""
    return round_up(num_outputs, HEAD_MULTIPLE)


def image_shape(task: Task, model: str, *, least: int = 1, multiple: int = 1) -> tuple[int, int, int]:
    """Returns channels, height and width of the images of ``task``.

    Args:
        task: of the data.
        model: what needs images, for messages.
        least: smallest height and width.
        multiple: number by which height and width must divide.

    Raises:
        ConfigError: the samples are no images, or images of other sizes.
    """
    shape = task.input_shape
    if len(shape) != 3:
        raise ConfigError(
            f"{model} takes images of shape [channels, height, width], but the samples of the data have shape "
            f"{list(shape)}; choose model=mlp, or data of images"
        )
    channels, height, width = shape
    if min(height, width) < least or height % multiple or width % multiple:
        needed = f"of at least {least} x {least} pixels" if multiple == 1 else f"whose sides divide by {multiple}"
        raise ConfigError(f"{model} takes images {needed}, but those of the data have {height} x {width}; resize them")
    return channels, height, width
