"""Export of ``model=hf``: the names are transformers' own; the rest of the folder is copied from the model's folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from dtrain.checkpoint.format.manifest import Manifest, TensorEntry
from dtrain.checkpoint.frozen_source import FrozenSource, digest_of
from dtrain.checkpoint.huggingface.folder import CONFIG, TOKENIZER_FOLDER, read_config
from dtrain.checkpoint.huggingface.tensor_mapping import TensorMapping, same_tensor
from dtrain.errors import CheckpointError

PREFIX = "hf."
"""Prefix of transformers' names in the model that ``dtrain.models.hf`` builds."""

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
    "*processor_config.json",
)


def same_tensors(
    weights: dict[str, TensorEntry], manifest: Manifest, where: str, prefix: str = PREFIX
) -> tuple[TensorMapping, ...]:
    """Returns the mapping of the weights and the persistent buffers of a checkpoint to names without ``prefix``.

    Buffers and whole numbers keep their dtype.

    Raises:
        CheckpointError: a name of a tensor has another prefix.
    """
    buffers = {entry.name: entry for entry in manifest.tensors if entry.kind == "buffer"}
    for name in (*weights, *buffers):
        if not name.startswith(prefix):
            model = "model=hf" if prefix == PREFIX else f"whose names begin with '{prefix}'"
            raise CheckpointError(f"{where}: '{name}' is not a tensor of its configured model, {model}")
    return tuple(
        same_tensor(name.removeprefix(prefix), entry.shape, name, _kept_dtype(entry))
        for name, entry in (weights | buffers).items()
    )


def _kept_dtype(entry: TensorEntry) -> torch.dtype | None:
    return entry.dtype if entry.kind == "buffer" or not entry.dtype.is_floating_point else None


def base_folder(values: Mapping[str, Any], source: FrozenSource | None, base: Path | str | None, where: str) -> Path:
    """Returns the folder with the configuration and tokenizer: ``base``, or that of the run, absolute.

    Args:
        values: the keys of the model, with its ``path``.
        source: the folder of the frozen weights, if the checkpoint holds none.
        base: the folder that the user names, if any.
        where: the checkpoint, for messages.

    Raises:
        CheckpointError: the folder has no configuration, or other weights than ``source``.
    """
    of_run = str(values.get("path"))
    # a source's path is absolute, model.path may be relative to the directory that the run was started in
    candidates = [base] if base is not None else [of_run] if source is None else [source.path, of_run]
    folder = next((Path(path).absolute() for path in candidates if (Path(path) / CONFIG).is_file()), None)
    if folder is None:
        raise CheckpointError(
            f"{candidates[0]} holds no {CONFIG}, and {where} is of model.path={of_run}; name the folder that has the "
            "configuration, weights and tokenizer of that model: --base FOLDER"
        )
    if source is not None and (own := digest_of(folder)) != source.sha256:
        raise CheckpointError(
            f"{where} was trained over the frozen weights of {source}, and {folder} holds others (sha256 {own[:12]}); "
            "name their folder: --base FOLDER"
        )
    return folder


def same_config(values: Mapping[str, Any], base: Path, names: Iterable[str] | None) -> dict[str, Any]:
    """Returns the ``config.json`` of the model in the folder ``base``, with ``model.args``, and without its dtype.

    References to Python files are dropped, because these are not copied.

    Args:
        values: the keys of the model.
        base: the folder.
        names: the weights of the model that was built; None: all those of the folder.
    """
    args = values.get("args")
    config: Mapping[str, Any] = replaced(read_config(base), args if isinstance(args, dict) else {})
    if names is not None:
        config = _of_weights(config, names)
    return {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype", "auto_map")}


def _of_weights(config: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Returns the part of a ``config.json`` that describes the model with these weights.

    It is ``config`` itself, or its ``text_config`` if that half of a model of images and text was built alone. Only the
    whole model has its text half in a component ``language_model``.
    """
    text = config.get("text_config")
    if not isinstance(text, dict) or any(text_name(name) != name for name in names):
        return config
    classes = config.get("architectures") or []
    return text | {"architectures": [str(name).replace("ForConditionalGeneration", "ForCausalLM") for name in classes]}


def text_name(name: str) -> str:
    """Returns the name of a tensor in the text half of a model: without one component ``language_model``."""
    return f".{name}".replace(".language_model.", ".", 1)[1:]


def replaced(config: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``config`` with ``args`` in it; its list with an entry a layer follows the number of layers."""
    merged = {**config, **args}
    layers, types = args.get("num_hidden_layers"), config.get("layer_types")
    if isinstance(layers, int) and isinstance(types, list) and "layer_types" not in args:
        merged["layer_types"] = types[:layers] if layers <= len(types) else None
    return merged


def copied_files(checkpoint: Path, base: Path | None = None) -> list[Path]:
    """Returns the files that an export copies: of the tokenizer, its chat template, generation and images.

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
