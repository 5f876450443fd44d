"""A checkpoint's masters as a folder that Hugging Face's `transformers` loads."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dtrain.checkpoint import storage
from dtrain.checkpoint.directory import make_directories, remove_tree
from dtrain.checkpoint.format.container import encode_header
from dtrain.checkpoint.format.fingerprint import byte_view
from dtrain.checkpoint.format.integrity import examine
from dtrain.checkpoint.format.manifest import Manifest, TensorEntry
from dtrain.checkpoint.format.shard_file import new_file
from dtrain.checkpoint.huggingface.config import model_of_state, to_hf
from dtrain.checkpoint.huggingface.folder import CONFIG, INDEX, WEIGHTS
from dtrain.checkpoint.huggingface.shapes import HFShape, Part, hf_shape
from dtrain.checkpoint.reader import CheckpointReader
from dtrain.checkpoint.report import find_one, naming
from dtrain.config.schema import ModelConfig
from dtrain.distributed.consensus import describe
from dtrain.errors import CheckpointError, ConfigError, nearest

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_SHARD_SIZE = 5 * 1000**3  # bytes
_MASTERS = ("master", "frozen")


def export(
    path: Path | str, out: Path | str, format: str = "hf", dtype: str = "fp32", max_shard_size: int = MAX_SHARD_SIZE
) -> Path:
    """Writes the weights of a checkpoint as a folder for `transformers`: ``config.json`` and safetensors.

    Every byte of the checkpoint is verified first. The weights are then read, converted and written block by block, so
    host memory stays at some MiB, or at one matrix of a GPT-2. The folder has its name once it is complete on disk.

    Args:
        path: one checkpoint, or a run directory or directory of checkpoints, whose newest is taken.
        out: the folder to make.
        format: ``hf``.
        dtype: of the weights: ``fp32``, exactly the masters, or rounded to nearest: ``bf16``, ``fp16``.
        max_shard_size: bytes of tensors in one file, from which on there are several; one tensor is never split.

    Returns:
        The folder.

    Raises:
        ConfigError: an unknown format or dtype.
        DamageError: the checkpoint does not verify.
        CheckpointError: there is none, its model has no shape that Hugging Face knows, a weight is too large for
            ``dtype``, ``out`` exists or cannot be written.
    """
    if format != "hf":
        raise ConfigError(f"unknown export format '{format}'; expected 'hf'")
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype '{dtype}'{nearest(dtype, DTYPES)}")
    out, checkpoint = Path(out), find_one(path)
    if out.is_symlink() or out.exists():
        raise CheckpointError(f"{out} exists; an export makes a new folder, so name another one or remove it")
    if checkpoint.resolve() in out.resolve().parents:
        raise CheckpointError(
            f"{out} lies in the checkpoint {checkpoint}, which holds its own files only; name another"
        )
    with naming(checkpoint):
        manifest = examine(checkpoint)
    model, shape = _shape_of(manifest, checkpoint)
    temporary = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}")
    try:
        make_directories(out.parent)
        storage.make_directory(temporary)
        try:
            _write(temporary, CheckpointReader(checkpoint, manifest), model, shape, DTYPES[dtype], max_shard_size)
            _commit(temporary, out)
        except BaseException:
            remove_tree(temporary)
            raise
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {describe(error)}") from error
    return out


def _shape_of(manifest: Manifest, checkpoint: Path) -> tuple[ModelConfig, HFShape]:
    """The model that the checkpoint states, its ``ffn_dim`` filled in; its tensors are those of that model."""
    model = model_of_state(manifest.state, str(checkpoint))
    held = _held(manifest)
    ffn, embed = held.get("blocks.0.ffn.down.weight"), held.get("embed.weight")
    if not ffn or not embed or len(ffn.shape) != 2 or len(embed.shape) != 2 or model.num_layers > len(held):
        raise CheckpointError(f"{checkpoint}: its tensors are not those of the model that it states, {model.factory}")
    model = replace(model, ffn_dim=ffn.shape[-1])
    if embed.shape[0] < (model.vocab_size or 0):
        raise CheckpointError(
            f"{checkpoint} states model.vocab_size={model.vocab_size}, and 'embed.weight' has {embed.shape[0]} rows"
        )
    shape = hf_shape(model, embed.shape[0])
    found = {name: entry.shape for name, entry in held.items()}
    for name in sorted(shape.tensors.keys() | found.keys()):
        expected, got = shape.tensors.get(name), found.get(name)
        if expected != got:
            raise CheckpointError(
                f"{checkpoint}: '{name}' is {_size(got)} there, and {_size(expected)} in the model that it states"
            )
    return model, shape


def _size(shape: Sequence[int] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def _held(manifest: Manifest) -> dict[str, TensorEntry]:
    return {entry.name: entry for entry in manifest.tensors if entry.kind in _MASTERS}


def _write(
    folder: Path,
    reader: CheckpointReader,
    model: ModelConfig,
    shape: HFShape,
    dtype: torch.dtype,
    max_shard_size: int,
) -> None:
    files = _shards(shape.parts, dtype, max_shard_size)
    kinds = {entry.name: entry.kind for entry in reader.tensors if entry.kind in _MASTERS}
    for name, parts in files.items():
        with new_file(folder / name) as append:
            append(encode_header([(part.name, dtype, part.shape) for part in parts]))
            for part in parts:
                for block in _converted(part, kinds[part.source], reader, dtype):
                    append(byte_view(block))
    if len(files) > 1:
        size = sum(part.numel for part in shape.parts) * dtype.itemsize
        weight_map = {part.name: name for name, parts in files.items() for part in parts}
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    _write_json(folder / CONFIG, to_hf(model, str(dtype).removeprefix("torch.")))
    storage.sync_directory(folder)


def _commit(temporary: Path, out: Path) -> None:
    storage.rename(temporary, out)
    try:
        storage.sync_directory(out.parent)
    except OSError:
        storage.rename(out, temporary)  # an export that failed leaves nothing under its name
        raise


def _shards(parts: Sequence[Part], dtype: torch.dtype, max_shard_size: int) -> dict[str, list[Part]]:
    """The files and what goes into each, in order; a file holds more than one tensor only up to ``max_shard_size``."""
    shards: list[list[Part]] = []
    size = 0
    for part in parts:
        nbytes = part.numel * dtype.itemsize
        if not shards or size + nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += nbytes
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


def _converted(part: Part, kind: str, reader: CheckpointReader, dtype: torch.dtype) -> Iterator[Tensor]:
    for start, stop in part.blocks():
        values = reader.read(kind, part.source, part.start + start, part.start + stop)
        cast = values.to(dtype)
        overflowed = cast.isinf() & values.isfinite()
        if overflowed.any():
            largest = values[overflowed].abs().max().item()
            wider = [name for name, other in DTYPES.items() if largest <= torch.finfo(other).max]
            raise CheckpointError(
                f"'{part.source}' holds {largest:g}, and the largest number of {str(dtype).removeprefix('torch.')} is "
                f"{torch.finfo(dtype).max:g}; export as {' or '.join(wider)}"
            )
        yield part.to_hf(cast)


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    with new_file(path) as append:
        append(json.dumps(value, indent=2).encode() + b"\n")
