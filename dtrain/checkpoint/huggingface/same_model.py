"""Export of ``model=hf``: the names are transformers' own; the rest of the folder is copied from the model's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dtrain.checkpoint.format.manifest import Manifest, TensorEntry
from dtrain.checkpoint.huggingface.folder import CONFIG, TOKENIZER_FOLDER, read_config
from dtrain.checkpoint.huggingface.tensor_mapping import TensorMapping, same_tensor
from dtrain.errors import CheckpointError

PREFIX = "hf."
"""Prefix of transformers' names in the model that :mod:`dtrain.models.hf` builds."""

_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
)


def same_tensors(weights: Mapping[str, TensorEntry], manifest: Manifest, where: str) -> tuple[TensorMapping, ...]:
    """Returns the mapping of the weights and the persistent buffers of a checkpoint of ``model=hf``.

    Raises:
        CheckpointError: a tensor is not of a model that ``model=hf`` builds.
    """
    buffers = {entry.name: entry for entry in manifest.tensors if entry.kind == "buffer"}
    for name in (*weights, *buffers):
        if not name.startswith(PREFIX):
            raise CheckpointError(f"{where}: '{name}' is not a tensor of its configured model, model=hf")
    parts = [same_tensor(name.removeprefix(PREFIX), entry.shape, name) for name, entry in weights.items()]
    kept = [
        same_tensor(name.removeprefix(PREFIX), entry.shape, name, dtype=entry.dtype) for name, entry in buffers.items()
    ]
    return (*parts, *kept)


def base_folder(values: Mapping[str, Any], base: Path | str | None, where: str) -> Path:
    """Returns the folder with the configuration and tokenizer: ``base``, or the ``model.path`` in ``values``."""
    if base is not None:
        return Path(base)
    path = Path(str(values.get("path")))
    if not (path / CONFIG).is_file():
        raise CheckpointError(
            f"{where} is of model.path={path}, which holds no {CONFIG} (any more); name the folder that has the "
            "configuration and tokenizer of the model: --base FOLDER"
        )
    return path


def same_config(values: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Returns the ``config.json`` of the model in the folder ``base``, with ``model.args``, and without its dtype.

    References to Python files are dropped, because these are not copied.
    """
    args = values.get("args")
    config = replaced(read_config(base), args if isinstance(args, dict) else {})
    return {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype", "auto_map")}


def replaced(config: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``config`` with ``args`` in it; its list with an entry a layer follows the number of layers."""
    merged = {**config, **args}
    layers, types = args.get("num_hidden_layers"), config.get("layer_types")
    if isinstance(layers, int) and isinstance(types, list) and "layer_types" not in args:
        merged["layer_types"] = types[:layers] if layers <= len(types) else None
    return merged


def copied_files(checkpoint: Path, base: Path | None = None) -> list[Path]:
    """Returns the files that an export copies: of the tokenizer, its chat template and generation.

    They are those of the folder ``base`` of the model, and, if it has no tokenizer, those of the data of the run.
    """
    found = {path.name: path for path in _matching(base)} if base is not None else {}
    if not any(name.startswith("tokenizer") for name in found):
        found |= {path.name: path for path in _matching(checkpoint.parent.parent / TOKENIZER_FOLDER)}
    return sorted(found.values())


def _matching(folder: Path) -> set[Path]:
    return {path for pattern in _COPIED for path in folder.glob(pattern) if path.is_file()}


def dtype_of(part: TensorMapping, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of an exported tensor: ``dtype``, or a buffer's own."""
    return part.dtype or dtype
