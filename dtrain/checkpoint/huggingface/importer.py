"""Import of a Hugging Face model as the first checkpoint of a run."""

from __future__ import annotations

import math
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from dtrain.checkpoint.commit import save
from dtrain.checkpoint.format.training_state import KEYED_BY
from dtrain.checkpoint.huggingface.config import from_hf
from dtrain.checkpoint.huggingface.folder import HFFolder
from dtrain.checkpoint.huggingface.tensor_mapping import ModelMapping, TensorMapping, model_mapping
from dtrain.checkpoint.snapshot import Snapshot, TensorShard
from dtrain.config.model import VOCAB_MULTIPLE, ModelConfig
from dtrain.distributed.consensus import describe
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.errors import CheckpointError, nearest
from dtrain.local_paths import local_path

_HEAD, _EMBED = "lm_head.weight", ("model.embed_tokens.weight", "transformer.wte.weight")
# stored in older files although the configuration determines them: masks, rotary frequencies
_DERIVED = re.compile(
    r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias|(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)
_BASE = re.compile(r"(model|transformer)\.")


@dataclass(frozen=True)
class ImportedModel:
    """Result of ``import_hf``: the new checkpoint and its model's configuration."""

    checkpoint: Path
    model: ModelConfig

    def overrides(self) -> list[str]:
        """Returns the ``key=value`` arguments of ``dtrain train`` that select this model."""
        default = ModelConfig()
        values = {item.name: getattr(self.model, item.name) for item in fields(ModelConfig)}
        changed = {name: value for name, value in values.items() if value != getattr(default, name)}
        return [
            f"model.{name}={str(value).lower() if isinstance(value, bool) else value}"
            for name, value in changed.items()
        ]


def import_hf(folder: Path | str, run_dir: Path | str) -> ImportedModel:
    """Writes ``run_dir/checkpoints/step-00000000`` from a Hugging Face folder of a Llama or GPT-2.

    It holds masters alone, the weights in FP32; ``dtrain train run_dir=...`` with the ``overrides`` of what is returned
    resumes from it. Host memory holds the whole model (4 bytes a parameter) and up to twice its largest tensor. Runs no
    code.

    Args:
        folder: a folder with ``config.json`` and safetensors, one file or several with an index.
        run_dir: directory of the new run; missing or empty.

    Raises:
        CheckpointError: an unsupported architecture, tensors that do not match the configuration, a damaged or missing
            file, or a run directory that is in use or cannot be written.
    """
    run_dir, folder = local_path(run_dir, "the run directory"), local_path(folder, "the folder to import")
    _require_new(run_dir)
    source = HFFolder(folder)
    model = from_hf(source.config)
    if model.num_layers > len(source.shapes):
        raise CheckpointError(
            f"{folder}: config.json states {model.num_layers} layers, the files hold {len(source.shapes)} tensors"
        )
    assert model.vocab_size is not None
    mapping = model_mapping(model, -(-model.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE)
    names = _match(folder, source, model, mapping)
    snapshot = Snapshot(0, tuple(_shards(source, mapping, names)), _state(model))
    checkpoint = save(run_dir / "checkpoints", snapshot, SingleRank(torch.device("cpu")))
    return ImportedModel(checkpoint, model)


def _require_new(run_dir: Path) -> None:
    """Raises if the run directory contains a file; a failed import may leave empty directories."""

    def refuse(error: OSError) -> None:
        raise CheckpointError(f"{run_dir} cannot be listed: {describe(error)}") from error

    if os.path.lexists(run_dir):
        for folder, _, files in os.walk(run_dir, onerror=refuse):
            for name in files:
                used = os.path.relpath(os.path.join(folder, name), run_dir)
                raise CheckpointError(
                    f"{run_dir} holds {used} already; an import starts a run, so name a new directory"
                )


def _match(folder: Path, source: HFFolder, model: ModelConfig, mapping: ModelMapping) -> dict[str, str]:
    """Checks names and shapes; returns part name -> name in the files, which may lack the base model's prefix."""
    names: dict[str, str] = {}
    for part in mapping.parts:
        bare = _BASE.sub("", part.name, count=1)
        found = next((name for name in (part.name, bare) if name in source.shapes), None)
        if found is None:
            raise CheckpointError(f"{folder} has no tensor '{part.name}'{nearest(part.name, source.shapes)}")
        if source.shapes[found] != part.shape:
            raise CheckpointError(
                f"{folder}: '{found}' has shape {list(source.shapes[found])}, config.json implies {list(part.shape)}"
            )
        names[part.name] = found
    extra = sorted(name for name in source.shapes.keys() - set(names.values()) if not _DERIVED.fullmatch(name))
    if extra == [_HEAD] and model.tie_embeddings:
        embed = next(names[name] for name in _EMBED if name in names)
        if not torch.equal(source.read(_HEAD), source.read(embed)):
            raise CheckpointError(
                f"{folder}: '{_HEAD}' differs from '{embed}', but config.json ties the two; set tie_word_embeddings to "
                "false there to keep both"
            )
    elif extra:
        raise CheckpointError(
            f"{folder}: '{extra[0]}' is not a tensor of the model that config.json describes"
            + (f" (and {len(extra) - 1} more)" if len(extra) > 1 else "")
        )
    return names


def _shards(source: HFFolder, mapping: ModelMapping, names: dict[str, str]) -> Iterator[TensorShard]:
    covered = dict.fromkeys(mapping.tensors, 0)
    for part in mapping.parts:
        size = mapping.tensors[part.source]
        stop = part.start + part.numel
        data = _read(source, part, names[part.name])
        yield TensorShard(part.source, "master", size, torch.float32, part.start, stop, data)
        covered[part.source] = stop  # the parts of a tensor are in row-major order
    for name, size in mapping.tensors.items():
        numel = math.prod(size)
        if covered[name] < numel:  # padding of the vocabulary
            rest = torch.zeros(numel - covered[name])
            yield TensorShard(name, "master", size, torch.float32, covered[name], numel, rest)


def _read(source: HFFolder, part: TensorMapping, name: str) -> Tensor:
    raw = source.read(name)
    result = torch.empty(part.numel)
    for start, stop in part.blocks():
        result[start:stop] = part.from_hf(raw[start:stop])
    if not bool(result.isfinite().all()):
        raise CheckpointError(f"'{name}' holds Inf or NaN; a model with such a weight cannot be trained")
    return result


def _state(model: ModelConfig) -> dict[str, object]:
    loss_scale = {"rule": {"mode": "none"}, "scale": 1.0, "clean_steps": 0, "overflows_left": 0}
    return {
        "run_id": uuid.uuid4().hex,
        "engine": "import",
        "world_size": 1,
        "zero_stage": 0,
        "optimizer": {},
        "engine_state": {"attempted_steps": 0, "applied_steps": 0, "loss_scale": loss_scale},
        # the engine keeps its own seed
        "rng": {"seed": None, "keyed_by": KEYED_BY},
        "data_cursor": 0,
        "aliases": {"head.weight": "embed.weight"} if model.tie_embeddings else {},
        "config": {"model": asdict(model)},
        "extra": {},
    }
