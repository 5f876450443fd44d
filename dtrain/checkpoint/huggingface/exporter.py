"""Export of a checkpoint's masters as a folder that Hugging Face's `transformers` loads."""

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
from dtrain.checkpoint.format.fingerprint import byte_view
from dtrain.checkpoint.format.integrity import verify_checkpoint
from dtrain.checkpoint.format.manifest import Manifest, TensorEntry
from dtrain.checkpoint.format.safetensors_file import encode_header
from dtrain.checkpoint.format.shard_file import new_file
from dtrain.checkpoint.huggingface.config import model_of_state, to_hf
from dtrain.checkpoint.huggingface.folder import CONFIG, INDEX, WEIGHTS
from dtrain.checkpoint.huggingface.tensor_mapping import ModelMapping, TensorMapping, model_mapping
from dtrain.checkpoint.inspection import newest_checkpoint, path_in_errors
from dtrain.checkpoint.reader import CheckpointReader
from dtrain.config.model import ModelConfig
from dtrain.distributed.consensus import describe
from dtrain.errors import CheckpointError, ConfigError, nearest

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_SHARD_SIZE = 5 * 1000**3  # bytes
KINDS = {"master": ("master", "frozen"), "ema": ("ema", "frozen")}  # kinds; frozen parameters have no master


def export(
    path: Path | str,
    out: Path | str,
    format: str = "hf",
    dtype: str = "fp32",
    max_shard_size: int = MAX_SHARD_SIZE,
    weights: str = "master",
) -> Path:
    """Writes the weights of a checkpoint as a folder for `transformers` (``config.json``, safetensors), ``out``.

    Verifies every byte of the checkpoint first. Then reads, converts and writes block by block, so host memory stays at
    a few MiB, or one matrix of a GPT-2. The folder gets its name once it is complete on disk.

    Args:
        path: one checkpoint, or a run directory or directory of checkpoints (the newest one is used).
        out: the folder to create.
        format: only ``hf``.
        dtype: ``fp32`` for exact masters; ``bf16`` and ``fp16`` round to nearest.
        max_shard_size: largest number of tensor bytes in one file; a single tensor is never split.
        weights: ``master``, or ``ema``: their exponential moving average.

    Raises:
        ConfigError: an unknown format, dtype or kind of weights.
        DamageError: the checkpoint does not verify.
        CheckpointError: there is no checkpoint, its model is not exportable, a weight is too large for ``dtype``, or
            ``out`` exists or cannot be written.
    """
    if format != "hf":
        raise ConfigError(f"unknown export format '{format}'; expected 'hf'")
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype '{dtype}'{nearest(dtype, DTYPES)}")
    if weights not in KINDS:
        raise ConfigError(f"unknown weights '{weights}'; expected {' or '.join(KINDS)}{nearest(weights, KINDS)}")
    out, checkpoint = Path(out), newest_checkpoint(path)
    if out.is_symlink() or out.exists():
        raise CheckpointError(f"{out} exists; an export creates a new folder, so name another one or remove it")
    if checkpoint.resolve() in out.resolve().parents:
        raise CheckpointError(
            f"{out} is inside the checkpoint {checkpoint}, which holds its own files only; name another folder"
        )
    with path_in_errors(checkpoint):
        manifest = verify_checkpoint(checkpoint)
    if weights not in {entry.kind for entry in manifest.tensors}:
        raise CheckpointError(f"{checkpoint} holds no {weights}; it was saved by a run without ema.decay")
    sources = {entry.name: entry for entry in manifest.tensors if entry.kind in KINDS[weights]}
    model, mapping = _model_of(manifest, sources, checkpoint)
    temporary = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}")
    try:
        make_directories(out.parent)
        storage.make_directory(temporary)
        try:
            kinds = {name: entry.kind for name, entry in sources.items()}
            reader = CheckpointReader(checkpoint, manifest)
            _write(temporary, reader, kinds, model, mapping, DTYPES[dtype], max_shard_size)
            _commit(temporary, out)
        except BaseException:
            remove_tree(temporary)
            raise
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {describe(error)}") from error
    return out


def _model_of(
    manifest: Manifest, weights: Mapping[str, TensorEntry], checkpoint: Path
) -> tuple[ModelConfig, ModelMapping]:
    """Returns the checkpoint's model with ``ffn_dim`` filled in, after checking the tensors against it."""
    model = model_of_state(manifest.state, str(checkpoint))
    ffn, embed = weights.get("blocks.0.ffn.down.weight"), weights.get("embed.weight")
    if not ffn or not embed or len(ffn.shape) != 2 or len(embed.shape) != 2 or model.num_layers > len(weights):
        raise CheckpointError(f"{checkpoint}: its tensors are not those of its configured model, {model.factory}")
    model = replace(model, ffn_dim=ffn.shape[-1])
    if embed.shape[0] < (model.vocab_size or 0):
        raise CheckpointError(
            f"{checkpoint} states model.vocab_size={model.vocab_size}, and 'embed.weight' has {embed.shape[0]} rows"
        )
    mapping = model_mapping(model, embed.shape[0])
    found = {name: entry.shape for name, entry in weights.items()}
    for name in sorted(mapping.tensors.keys() | found.keys()):
        expected, got = mapping.tensors.get(name), found.get(name)
        if expected != got:
            raise CheckpointError(
                f"{checkpoint}: '{name}' is {_size(got)}, expected {_size(expected)} for its configured model"
            )
    return model, mapping


def _size(shape: Sequence[int] | None) -> str:
    return "absent" if shape is None else str(list(shape))


def _write(
    folder: Path,
    reader: CheckpointReader,
    kinds: Mapping[str, str],
    model: ModelConfig,
    mapping: ModelMapping,
    dtype: torch.dtype,
    max_shard_size: int,
) -> None:
    files = _split_into_files(mapping.parts, dtype, max_shard_size)
    for name, parts in files.items():
        with new_file(folder / name) as append:
            append(encode_header([(part.name, dtype, part.shape) for part in parts]))
            for part in parts:
                for block in _converted(part, kinds[part.source], reader, dtype):
                    append(byte_view(block))
    if len(files) > 1:
        size = sum(part.numel for part in mapping.parts) * dtype.itemsize
        weight_map = {part.name: name for name, parts in files.items() for part in parts}
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    _write_json(folder / CONFIG, to_hf(model, str(dtype).removeprefix("torch.")))
    storage.sync_directory(folder)


def _commit(temporary: Path, out: Path) -> None:
    storage.rename(temporary, out)
    try:
        storage.sync_directory(out.parent)
    except OSError:
        storage.rename(out, temporary)  # a failed export keeps nothing under its name
        raise


def _split_into_files(
    parts: Sequence[TensorMapping], dtype: torch.dtype, max_shard_size: int
) -> dict[str, list[TensorMapping]]:
    """Assigns the tensors to files in order; only a file with a single tensor may exceed ``max_shard_size``."""
    shards: list[list[TensorMapping]] = []
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


def _converted(part: TensorMapping, kind: str, reader: CheckpointReader, dtype: torch.dtype) -> Iterator[Tensor]:
    for start, stop in part.blocks():
        values = reader.read(kind, part.source, part.start + start, part.start + stop)
        cast = values.to(dtype)
        overflowed = cast.isinf() & values.isfinite()  # a finite master may exceed FP16's 65,504
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
