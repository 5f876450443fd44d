"""Image classifiers of transformers, as ``model=vit``: of a local folder, or from entries of config.json alone.

As with ``model=hf``, no code of the folder runs, no pickle is read, and nothing is fetched. The functions that need
transformers import it, which takes seconds.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config.model import ModelConfig
from dtrain.distributed.logging import logger
from dtrain.errors import ConfigError, one_line
from dtrain.models.hf import (
    check_folder,
    check_installed,
    import_transformers,
    load_weights,
    make_config,
    quiet,
)
from dtrain.models.images.layout import in_layout
from dtrain.models.task_shapes import image_shape
from dtrain.tasks import Classification, Task

_SMALL_VIT = {
    "model_type": "vit",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "patch_size": 4,
}
"""Entries of config.json without ``model.path`` and ``model.args.model_type``: about 0.5 million parameters."""


class HFImageModel(nn.Module):
    """A model of transformers for image classification, whose outputs are classes or target values.

    Attributes:
        hf: the model of transformers. Its parameters are called ``hf.`` and transformers' name.
        channels_last: see ``dtrain.models.images.layout.in_layout``.
    """

    def __init__(self, hf: Any, channels_last: Any = "auto") -> None:
        super().__init__()
        self.hf = hf
        self.channels_last = channels_last

    def forward(self, images: Tensor) -> Tensor:
        """Returns the prediction [B, outputs] for ``images`` [B, C, H, W]."""
        prediction: Tensor = self.hf(pixel_values=in_layout(images, self.channels_last)).logits
        return prediction

    def hf_config(self) -> dict[str, Any]:
        """Returns the ``config.json`` with which transformers builds the model again, without its dtype."""
        values: dict[str, Any] = json.loads(self.hf.config.to_json_string())
        values["architectures"] = [type(self.hf).__name__]
        left_out = ("dtype", "torch_dtype", "auto_map")
        return {key: value for key, value in values.items() if key not in left_out and not key.startswith("_")}


def build(config: ModelConfig, task: Task) -> HFImageModel:
    """Builds the model in FP32, whatever its files hold; on ``meta`` without reading weights.

    With the weights of a folder, the head is drawn at random if it is for another number of outputs. With random
    weights, channels and size of the images are those of ``task`` too, unless ``model.args`` has them. Without a
    folder, ``model.args`` are entries of config.json: with a ``model_type`` beside the defaults of its class, otherwise
    beside those of a small vision transformer.

    Raises:
        ConfigError: transformers is missing; the data are no images, or of a size that the model does not take; or the
            folder or the entries give no model for image classification.
    """
    shape = image_shape(task, f"model={config.name}")
    hf_config = _hf_config(config, task, shape)
    model_class = _model_class(config, hf_config)
    options = {
        "dtype": torch.float32,
        "attn_implementation": "sdpa" if model_class._supports_sdpa else "eager",
    }
    with quiet():
        try:
            with torch.device("meta"):
                hf = model_class._from_config(hf_config, **options)
                # without memory, because a file may claim any size
                _check_image(HFImageModel(hf, config.channels_last), config, shape)
            if torch.empty(0).is_meta:
                pass
            elif _loads(config):
                hf = load_weights(model_class, hf_config, str(config.path), options, draws_head=True)
            else:
                hf = model_class._from_config(hf_config, **options)
        except ConfigError:
            raise
        except Exception as error:  # the class decides what it raises for values and weights that do not fit
            raise ConfigError(f"{_source(config)}: transformers cannot build the model: {one_line(error)}") from error
    return HFImageModel(hf, config.channels_last).train()


def check_model(config: ModelConfig) -> None:
    """Checks the folder without reading weights, whatever the data are; raises ``ConfigError`` as ``build``."""
    _model_class(config, _read_config(config))


def _loads(config: ModelConfig) -> bool:
    return config.path is not None and config.weights == "load"


def _source(config: ModelConfig) -> str:
    return f"model={config.name} model.path={config.path}" if config.path else f"model={config.name} model.args"


def _read_config(config: ModelConfig) -> Any:
    """Returns the configuration of transformers, of the folder or of ``model.args`` alone; raises as ``build``."""
    if config.path is None:
        check_installed(config)
        values = {"model_type": config.args["model_type"]} if "model_type" in config.args else _SMALL_VIT
    else:
        values = check_folder(config)
        kind, given = values.get("model_type"), config.args.get("model_type")
        if given not in (None, kind):
            raise ConfigError(
                f"model.args.model_type={given} differs from {kind!r:.80}, that of model.path={config.path}; remove "
                "one of both"
            )
    return make_config(values, config.args, _source(config))


def _hf_config(config: ModelConfig, task: Task, shape: tuple[int, int, int]) -> Any:
    """Returns the configuration of transformers, with the outputs of ``task`` in it; raises as ``build``."""
    hf_config = _read_config(config)
    if not _loads(config):
        channels, height, width = shape
        is_pair = height != width or isinstance(getattr(hf_config, "image_size", None), (list, tuple))
        for key, value in (("num_channels", channels), ("image_size", [height, width] if is_pair else height)):
            if key in config.args or not hasattr(hf_config, key):
                continue
            try:
                setattr(hf_config, key, value)
            except Exception as error:  # the class decides what it raises for a bad value
                raise ConfigError(
                    f"{_source(config)}: the images of the data need {key}={value}, which a model of model_type "
                    f"{hf_config.model_type} does not take: {one_line(error)}; set model.args.{key}, or take another"
                ) from error
    _set_outputs(hf_config, task, config)
    return hf_config


def _set_outputs(hf_config: Any, task: Task, config: ModelConfig) -> None:
    num, stored = task.num_outputs, dict(hf_config.id2label or {})
    labels = task.labels if isinstance(task, Classification) else [f"target {index}" for index in range(num)]
    names = dict(enumerate(labels))
    if _loads(config):
        if len(stored) != num:
            logger.info(
                "model.path=%s has %d classes, the data %d outputs: the head is new", config.path, len(stored), num
            )
        elif stored != names:
            logger.info(
                "model.path=%s calls its classes '%s', ..., the data '%s', ...: the head is kept, by number",
                *(config.path, stored.get(0), names[0]),
            )
    hf_config.id2label = names
    hf_config.label2id = {label: index for index, label in names.items()}


def _model_class(config: ModelConfig, hf_config: Any) -> Any:
    """Returns the class for image classification; of several the one that config.json names, or the first."""
    mapping = import_transformers().MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    if type(hf_config) not in mapping:
        raise ConfigError(
            f"{_source(config)}: transformers has no image classifier of model_type {hf_config.model_type}; take one "
            "such as vit, convnext, resnet or swin"
        )
    found = mapping[type(hf_config)]
    if not isinstance(found, (list, tuple)):
        return found
    named = [each for each in found if each.__name__ in (hf_config.architectures or ())]
    return (named or found)[0]


@torch.no_grad()
def _check_image(model: HFImageModel, config: ModelConfig, shape: tuple[int, int, int]) -> None:
    """Raises ``ConfigError`` if the model, on the default device, does not take one image of ``shape``."""
    try:
        model.eval()(torch.zeros(1, *shape))
    except Exception as error:  # the model decides what it raises for a size that does not fit
        if "meta tensor" in str(error):  # it reads values, which only the first step has
            return
        channels, height, width = shape
        fix = "model.weights=random" if _loads(config) else "entries of config.json in model.args that fit them"
        raise ConfigError(
            f"{_source(config)}: the model does not take the images of the data, {height} x {width} with {channels} "
            f"channels: {one_line(error)}; choose images of its size, or {fix}"
        ) from error
