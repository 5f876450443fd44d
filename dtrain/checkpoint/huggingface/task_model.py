"""Export of models of images and numbers: the names are those of the user's module; the task stands in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dtrain.config.model import HF_IMAGES_FACTORY, USED_KEYS, ModelKeys
from dtrain.errors import CheckpointError

TASK = "task"
"""Key in a checkpoint's extra, and in ``config.json``: the description of the task."""
HF_CONFIG = "hf_config"
"""Key in a checkpoint's extra: ``config.json`` of a model of transformers for images."""
OWN = "dtrain"
"""Key in ``config.json`` of a model of transformers, under which the task stands."""
MODEL = "model"
"""Key in ``config.json`` of other models: the keys of the model."""
PREPROCESSOR = "preprocessor_config.json"

_PREFIX = "model."  # that the wrapper with the loss of a task gives to names


def task_of(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the description of the task in a checkpoint's state; None if it has none."""
    extra = state.get("extra")
    task = extra.get(TASK) if isinstance(extra, Mapping) else None
    return task if isinstance(task, Mapping) else None


def task_prefix(values: Mapping[str, Any]) -> str:
    """Returns the prefix of the names in a checkpoint that those of the exported module lack."""
    return f"{_PREFIX}hf." if values["factory"] == HF_IMAGES_FACTORY else _PREFIX


def task_config(values: Mapping[str, Any], state: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns ``config.json``, without its dtype.

    Args:
        values: the keys of the model.
        state: of the checkpoint, with a task.
        where: the checkpoint, for messages.

    Raises:
        CheckpointError: the checkpoint lacks the configuration of a model of transformers.
    """
    task, factory = task_of(state), values["factory"]
    if factory == HF_IMAGES_FACTORY:
        config = state["extra"].get(HF_CONFIG)
        if not isinstance(config, Mapping) or "model_type" not in config:
            raise CheckpointError(
                f"{where} lacks the config.json of its model; one more step of dtrain train from it saves a checkpoint "
                "that has it"
            )
        return {**config, OWN: {TASK: task}}
    used = USED_KEYS.get(str(factory), tuple(item.name for item in fields(ModelKeys)))
    names = [item.name for item in fields(ModelKeys) if item.name in (*used, "name", "factory")]
    return {MODEL: {name: values[name] for name in names if name in values}, TASK: task}


def preprocessor_config(task: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns ``preprocessor_config.json`` of images in colors, None of other inputs.

    The processors of transformers convert every image to RGB. That of CLIP takes the square in the middle too, after it
    has resized the whole image, so that pixels differ where the sides of an image do not divide.
    """
    shape, mean, std = (task.get(name) for name in ("input_shape", "input_mean", "input_std"))
    if not task.get("is_image") or not isinstance(shape, list) or len(shape) != 3 or shape[0] != 3:
        return None
    size = {"height": shape[1], "width": shape[2]}
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": min(size.values())},
        "resample": 2,  # bilinear
        "do_center_crop": True,
        "crop_size": size,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }
