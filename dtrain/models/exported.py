"""Loads what ``dtrain checkpoint export`` wrote of a model of images or numbers. No code of the folder runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.checkpoint.huggingface.folder import CONFIG, HFFolder
from dtrain.checkpoint.huggingface.task_model import MODEL, OWN, TASK
from dtrain.config.fields import from_json
from dtrain.config.model import (
    CONVNET_FACTORY,
    DENOISER_FACTORY,
    HF_IMAGES_FACTORY,
    MLP_FACTORY,
    USED_KEYS,
    ModelConfig,
)
from dtrain.errors import CheckpointError, ConfigError, nearest, one_line
from dtrain.local_paths import local_path
from dtrain.models.factory import build_model
from dtrain.models.images.hf import HFImageModel
from dtrain.models.task_model import TaskModel
from dtrain.tasks import Task
from dtrain.tasks.description import read_task

_FACTORIES = (CONVNET_FACTORY, MLP_FACTORY, DENOISER_FACTORY)
_LAYERS = ("num_hidden_layers", "num_layers", "depths")
"""Keys of transformers that are numbers of layers."""
_KEYS = (MODEL, TASK, "dtype")


class ExportedModel(nn.Module):
    """A trained model in FP32 and evaluation mode, whose parameters are frozen.

    Attributes:
        model: the module that was trained.
        task: what it was trained for; ``dtrain.read_image`` and ``dtrain.standardize`` prepare inputs with it.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self.task = task
        self.requires_grad_(False).eval()

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns the prediction for ``inputs`` [B, ...], prepared as those of the data.

        It is of classification the scores of the classes FP32 [B, classes], of regression the values in the unit of
        the data FP64 [B, D], and of denoising, whose inputs are ``noisy``, ``times`` and ``classes``, the velocity FP32
        [B, C, H, W].
        """
        prediction: Tensor = self.model(*inputs)
        return self.task.in_data_units(prediction.float())


def load_exported(folder: str | os.PathLike[str]) -> ExportedModel:
    """Loads a model of images or numbers of dtrain's own, or of transformers, from the folder of its export.

    Sizes in ``config.json`` are compared with the files before anything is allocated.

    Args:
        folder: written by ``dtrain checkpoint export``, in any dtype.

    Returns:
        the model in FP32 on the CPU.

    Raises:
        CheckpointError: the folder is damaged or of another kind; or its model is of the user's own factory, which is
            never imported because a file names it; or transformers is needed and not installed.
    """
    path = local_path(folder, "the folder of the export")
    files = HFFolder(path)
    where = f"{path / CONFIG}"
    if "model_type" in files.config:
        return _of_transformers(files, path, where)
    for key in _KEYS[:2]:
        if key not in files.config:
            raise CheckpointError(f"{where} lacks '{key}'; give a folder that dtrain checkpoint export wrote")
    _check_keys(files.config, _KEYS, where)
    task = read_task(files.config[TASK], f"{where}: {TASK}")
    config = _model_config(files, where)
    expected = _shapes(config, task, where)
    _compare(expected, files, path)
    model = _network(build_model(config, task, seed=0))
    for name, tensor in model.state_dict().items():
        tensor.copy_(files.read(name, accept_others=True).view(tensor.shape))
    return ExportedModel(model, task)


def _of_transformers(files: HFFolder, path: Path, where: str) -> ExportedModel:
    own = files.config.get(OWN)
    if not isinstance(own, dict) or TASK not in own:
        raise CheckpointError(
            f"{where} has no '{OWN}.{TASK}', so it is no export of an image model of dtrain; load it with transformers"
        )
    task = read_task(own[TASK], f"{where}: {OWN}.{TASK}")
    for key in _LAYERS:  # each takes time, also without memory
        counts = files.config.get(key)
        if any(type(n) is int and n > len(files.shapes) for n in (counts if isinstance(counts, list) else [counts])):
            raise CheckpointError(
                f"{where}: {key}={counts!r:.80} is more than the {len(files.shapes)} tensors of the folder"
            )
    config = ModelConfig(name="vit", factory=HF_IMAGES_FACTORY, path=str(path))
    expected = {name.removeprefix("hf."): shape for name, shape in _shapes(config, task, where).items()}
    _compare(expected, files, path)
    model = _network(build_model(config, task, seed=0))
    assert isinstance(model, HFImageModel)
    return ExportedModel(model, task)


def _model_config(files: HFFolder, where: str) -> ModelConfig:
    """Returns the keys of a model of dtrain's own, whose sizes are those of no more than the files hold."""
    values = files.config[MODEL]
    factory = values.get("factory") if isinstance(values, dict) else None
    if factory not in _FACTORIES:
        raise CheckpointError(
            f"{where}: model.factory={factory!r:.120} is not one of dtrain's ({', '.join(_FACTORIES)}), and no code is "
            "imported because a file names it; build your module, and load its weights with "
            "safetensors.torch.load_model(module, FOLDER/model.safetensors)"
        )
    _check_keys(values, ("name", "factory", *USED_KEYS[factory]), f"{where}: {MODEL}")
    try:
        config = from_json(ModelConfig, values, f"{where}: {MODEL}")
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    widest = max((size for shape in files.shapes.values() for size in shape), default=0)
    for key, value, most in (
        ("num_layers", config.num_layers, len(files.shapes)),
        ("hidden_dim", config.hidden_dim, widest),
    ):
        if value > most:
            raise CheckpointError(f"{where}: {MODEL}.{key}={value} is more than the tensors of the folder have, {most}")
    return config


def _check_keys(values: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    names = tuple(known)
    for key in values:
        if key not in names:
            raise CheckpointError(f"{where} has the unknown key {key!r:.80}{nearest(key, names)}")


def _shapes(config: ModelConfig, task: Task, where: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the model's tensors, without memory for them."""
    try:
        with torch.device("meta"):
            model = _network(build_model(config, task, seed=0))
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except (RuntimeError, OverflowError, ValueError) as error:  # torch, of sizes that no tensor has
        raise CheckpointError(f"{where}: its model cannot be built: {one_line(error)}") from error
    # a checkpoint holds tied weights once
    tensors = {id(tensor): (name, tensor) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    return {name: tuple(tensor.shape) for name, tensor in tensors.values()}


def _network(model: nn.Module) -> nn.Module:
    assert isinstance(model, TaskModel)
    return model.model


def _compare(expected: Mapping[str, tuple[int, ...]], files: HFFolder, path: Path) -> None:
    for name in sorted(expected.keys() | files.shapes.keys()):
        want, got = expected.get(name), files.shapes.get(name)
        if want != got:
            raise CheckpointError(
                f"{path}: '{name}' is {_text(got)}, but in the model that {CONFIG} describes it is {_text(want)}"
            )


def _text(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))
