"""Export of a checkpoint's masters as a folder that Hugging Face's `transformers` loads."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint import storage
from dtrain.checkpoint.directory import make_directories, remove_tree
from dtrain.checkpoint.format.fingerprint import byte_view
from dtrain.checkpoint.format.integrity import verify_checkpoint
from dtrain.checkpoint.format.manifest import Manifest, TensorEntry
from dtrain.checkpoint.format.safetensors_file import encode_header
from dtrain.checkpoint.format.shard_file import new_file
from dtrain.checkpoint.huggingface.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapters, MergedReader
from dtrain.checkpoint.huggingface.config import built_in_model, model_values, to_hf
from dtrain.checkpoint.huggingface.folder import CONFIG, INDEX, WEIGHTS, HFFolder
from dtrain.checkpoint.huggingface.same_model import base_folder, copied_files, dtype_of, same_config, same_tensors
from dtrain.checkpoint.huggingface.task_model import (
    PREPROCESSOR,
    preprocessor_config,
    task_config,
    task_of,
    task_prefix,
)
from dtrain.checkpoint.huggingface.tensor_mapping import TensorMapping, model_mapping
from dtrain.checkpoint.inspection import newest_checkpoint, path_in_errors
from dtrain.checkpoint.reader import CheckpointReader
from dtrain.config.model import HF_FACTORY, HF_IMAGES_FACTORY, LANGUAGE_FACTORIES
from dtrain.distributed.consensus import describe
from dtrain.errors import CheckpointError, ConfigError, nearest
from dtrain.local_paths import local_path

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_SHARD_SIZE = 5 * 1000**3  # bytes
_COPY_BYTES = 1 << 20
KINDS = {"master": ("master", "frozen"), "ema": ("ema", "frozen")}  # kinds; frozen parameters have no master


@dataclass(frozen=True)
class _Plan:
    """An export: ``config.json`` without its dtype, the key of that if any, the tensors, and the files to copy.

    ``reader`` reads tensors, if not from the checkpoint itself; ``written`` are further files of JSON.
    """

    config: dict[str, Any]
    dtype_key: str | None
    parts: tuple[TensorMapping, ...]
    copied: list[Path] = field(default_factory=list)
    reader: MergedReader | None = None
    written: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def export(
    path: Path | str,
    out: Path | str,
    format: str = "hf",
    dtype: str = "fp32",
    max_shard_size: int = MAX_SHARD_SIZE,
    weights: str = "master",
    base: Path | str | None = None,
    merge: bool = False,
) -> Path:
    """Writes the weights of a checkpoint as a folder (``config.json``, safetensors), and returns its path, ``out``.

    It is for `transformers`, or, of a model of images or numbers, for ``dtrain.load_exported``. Verifies every byte of
    the checkpoint first. Then reads, converts and writes block by block, so host memory stays at a few MiB, or one
    matrix of a GPT-2. The folder gets its name once it is complete on disk.

    Args:
        path: one checkpoint, or a run directory or directory of checkpoints (the newest one is used).
        out: the folder to create.
        format: only ``hf``.
        dtype: ``fp32`` for exact masters; ``bf16`` and ``fp16`` round to nearest.
        max_shard_size: largest number of tensor bytes in one file, 5e9 by default; a single tensor is never split.
        weights: ``master``, or ``ema``: their exponential moving average.
        base: of model=hf, the folder with the configuration, tokenizer and frozen weights; None: that of the run.
        merge: of a run with adapters, write the whole model, with the adapters merged in FP32; else they alone are
            written, as a folder for `peft`.

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
    if base is not None:
        base = local_path(base, "the folder of the model")
    out, checkpoint = local_path(out, "the folder of the export"), newest_checkpoint(path)
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
    reader = CheckpointReader(checkpoint, manifest)
    plan = _plan(manifest, sources, reader, base, merge=merge)
    temporary = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}")
    try:
        make_directories(out.parent)
        storage.make_directory(temporary)
        try:
            kinds = {entry.name: "buffer" for entry in manifest.tensors if entry.kind == "buffer"}
            kinds |= {name: entry.kind for name, entry in sources.items()}
            _write(temporary, reader, kinds, plan, DTYPES[dtype], max_shard_size)
            _commit(temporary, out)
        except BaseException:
            remove_tree(temporary)
            raise
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {describe(error)}") from error
    return out


def _plan(
    manifest: Manifest,
    weights: dict[str, TensorEntry],
    reader: CheckpointReader,
    base: Path | str | None,
    *,
    merge: bool,
) -> _Plan:
    checkpoint = reader.path
    values = model_values(manifest.state, str(checkpoint))
    adapters = Adapters.of(values, weights, manifest, str(checkpoint)) if values["factory"] == HF_FACTORY else None
    if merge and adapters is None:
        raise ConfigError(f"{checkpoint} has no adapters to merge; it is of a run without model.lora")
    if values["factory"] != HF_FACTORY:
        if base is not None:
            raise ConfigError(f"{checkpoint} is of {values['factory']}, which has no folder; --base is for model=hf")
        if values["factory"] in LANGUAGE_FACTORIES:
            return _built_in(values, weights, checkpoint)
        return _of_task(values, weights, manifest, str(checkpoint))
    source = reader.training.source if reader.training is not None else None
    if adapters is not None and not merge and source is None:
        raise CheckpointError(
            f"{checkpoint} holds frozen weights of its own, so its adapters belong to no folder; write the whole "
            f"model: --merge"
        )
    folder = base_folder(values, source, base, str(checkpoint))
    if adapters is None:
        merged, parts = None, same_tensors(weights, manifest, str(checkpoint))
    elif merge:
        merged = MergedReader(adapters, reader, None if source is None else HFFolder(folder))
        parts = tuple(merged.parts())
    else:
        return _Plan(adapters.config(str(folder)), None, adapters.parts())
    names = None if merge and source is not None else [part.name for part in parts]
    return _Plan(same_config(values, folder, names), "dtype", parts, copied_files(checkpoint, folder), merged)


def _of_task(values: Mapping[str, Any], weights: dict[str, TensorEntry], manifest: Manifest, where: str) -> _Plan:
    """Plans the export of a model of images or numbers, under the names of its own module."""
    config = task_config(values, manifest.state, where)
    parts = same_tensors(weights, manifest, where, task_prefix(values))
    processor = preprocessor_config(task_of(manifest.state) or {}) if values["factory"] == HF_IMAGES_FACTORY else None
    return _Plan(config, "dtype", parts, written={PREPROCESSOR: processor} if processor else {})


def _built_in(values: Mapping[str, Any], weights: Mapping[str, TensorEntry], checkpoint: Path) -> _Plan:
    """Plans the export of a model of dtrain's own factories, after checking the tensors against it."""
    model = built_in_model(values, str(checkpoint))
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
    return _Plan(to_hf(model), "torch_dtype", mapping.parts, copied_files(checkpoint))


def _size(shape: Sequence[int] | None) -> str:
    return "absent" if shape is None else str(list(shape))


def _write(
    folder: Path,
    reader: CheckpointReader,
    kinds: Mapping[str, str],
    plan: _Plan,
    dtype: torch.dtype,
    max_shard_size: int,
) -> None:
    if plan.dtype_key is None:  # peft reads a single file
        files = {ADAPTER_WEIGHTS: list(plan.parts)}
    else:
        files = _split_into_files(plan.parts, dtype, max_shard_size)
    for name, parts in files.items():
        with new_file(folder / name) as append:
            append(encode_header([(part.name, dtype_of(part, dtype), part.shape) for part in parts]))
            for part in parts:
                for block in _converted(part, kinds.get(part.source, ""), plan.reader or reader, dtype_of(part, dtype)):
                    append(byte_view(block))
    if len(files) > 1:
        size = sum(part.numel * dtype_of(part, dtype).itemsize for part in plan.parts)
        weight_map = {part.name: name for name, parts in files.items() for part in parts}
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    if plan.dtype_key is None:
        _write_json(folder / ADAPTER_CONFIG, plan.config)
    else:
        _write_json(folder / CONFIG, plan.config | {plan.dtype_key: str(dtype).removeprefix("torch.")})
    for name, values in plan.written.items():
        _write_json(folder / name, values)
    for path in plan.copied:
        with path.open("rb") as source, new_file(folder / path.name) as append:
            while data := source.read(_COPY_BYTES):
                append(data)
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
        nbytes = part.numel * dtype_of(part, dtype).itemsize
        if not shards or size + nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += nbytes
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


def _converted(
    part: TensorMapping, kind: str, reader: CheckpointReader | MergedReader, dtype: torch.dtype
) -> Iterator[Tensor]:
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
