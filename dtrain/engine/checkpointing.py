"""Between an engine's tensors and the logical tensors of a checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dtrain import checkpoint
from dtrain.checkpoint import CheckpointReader, ReadTarget, Snapshot
from dtrain.checkpoint.snapshot import TensorShard
from dtrain.distributed.consensus import on_every_rank
from dtrain.distributed.logging import logger
from dtrain.errors import CheckpointError, nearest
from dtrain.parameters.groups import aliases

if TYPE_CHECKING:
    from dtrain.engine.step import StepEngine


_TRAINED = ("master", "exp_avg", "exp_avg_sq")
_FLOAT8_BITS = ("recipe", "weight_scale", "grad_format", "emulate", "fast_accumulation")
"""The FP8 options that the bits of a product follow from."""

_CAST_ELEMENTS = 1 << 20  # of a frozen tensor, compared with its saved values at a time


def snapshot_of(
    engine: StepEngine,
    *,
    extra: Mapping[str, Any] | None,
    config: Mapping[str, Any] | None,
    metrics: Mapping[str, float | None] | None,
) -> Snapshot:
    """What this rank owns, where it lies now, and the state; see :meth:`dtrain.engine.interface.Engine.save`."""
    pieces = [*_owned_pieces(engine)]
    if engine.rank == 0:
        pieces += _replicated_pieces(engine)
    state = {
        "run_id": engine.run_id,
        "engine": engine.name,
        "world_size": engine.world_size,
        "zero_stage": engine.options.zero_stage,
        "contract": engine.contract.to_dict(),
        "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
        "optimizer": asdict(engine.options.optimizer),
        "engine_state": {
            "attempted_steps": engine.attempted_steps,
            "applied_steps": engine.applied_steps,
            "loss_scale": engine.loss_scale.to_dict(),
            **engine.saved_state(),
        },
        "rng": {"seed": engine.seed, "keyed_by": ["seed", "attempted_steps", "global_micro_batch"]},
        "data_cursor": engine.data_cursor,
        "aliases": aliases(engine.module),
        "metrics": {
            name: float(value) for name, value in (metrics or {}).items() if value is not None and math.isfinite(value)
        },
        "config": dict(config or {}),
        "config_hash": _config_hash(config or {}),
        "extra": dict(extra or {}),
    }
    return Snapshot(engine.attempted_steps, tuple(pieces), state)


def _config_hash(config: Mapping[str, Any]) -> str:
    """Names a configuration before its secrets are blanked; what is no plain JSON is refused when it is saved."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":"), default=repr).encode()).hexdigest()


def open_checkpoint(engine: StepEngine, path: Path) -> CheckpointReader:
    """The newest checkpoint that verifies and is of this model; overwrites nothing."""
    reader = checkpoint.open_newest(path, engine.comm)
    _check_same_model(engine, reader)
    return reader


def fill(engine: StepEngine, reader: CheckpointReader) -> dict[str, Any]:
    """Fills this rank's tensors and counters; returns the checkpoint's ``extra``. Where one rank fails, all raise."""
    what = f"reading {reader.path}"
    on_every_rank(engine.comm, what, lambda: _read_into_place(engine, reader), CheckpointError)
    reader.check_fingerprints(_proofs(engine, reader), engine.comm)
    saved = reader.state["engine_state"]
    engine.attempted_steps = int(saved["attempted_steps"])
    engine.applied_steps = int(saved["applied_steps"])
    _warn_of_other_bits(engine, reader)
    engine.loss_scale = engine.loss_scale.restored(saved["loss_scale"])
    engine.restore_state(saved)
    engine.data_cursor = int(reader.state["data_cursor"])
    seed = reader.state["rng"]["seed"]
    if seed is not None:  # an imported model has none
        engine.seed = int(seed)
    engine.run_id = str(reader.state["run_id"])
    extra: dict[str, Any] = reader.state["extra"]
    return extra


def _warn_of_other_bits(engine: StepEngine, reader: CheckpointReader) -> None:
    saved, own = reader.state["optimizer"].get("compile"), engine.options.optimizer.compile
    if saved is not None and saved != own:
        logger.warning(
            f"{reader.path} was saved with optim.compile={str(saved).lower()}, this run has {str(own).lower()}: the "
            f"two updates round differently, so the run goes on, and not bit for bit as it would have"
        )
    contracts = (reader.state.get("contract") or {}, engine.contract.to_dict())
    before, now = map(_formats, contracts)
    changed = [name for name in now if before.get(name, now[name]) != now[name]]
    if changed:
        listed = ", ".join(f"'{name}' in {before[name]} (now {now[name]})" for name in changed[:3])
        logger.warning(
            f"{reader.path} was saved with {listed}{', ...' if changed[3:] else ''}: {len(changed)} modules compute in "
            f"another format, so the run goes on, and not bit for bit as it would have"
        )
    saved_options, own_options = (contract.get("float8") for contract in contracts)
    if saved_options and own_options:
        others = {key: saved_options[key] for key in _FLOAT8_BITS if saved_options[key] != own_options[key]}
        if others:
            listed = ", ".join(f"{key}={value} (now {own_options[key]})" for key, value in others.items())
            logger.warning(
                f"{reader.path} was saved with float8 {listed}: FP8 products round differently, so the run goes on, "
                f"and not bit for bit as it would have"
            )


def _formats(contract: Mapping[str, Any]) -> dict[str, str]:
    """Of each module; empty for a checkpoint that does not tell."""
    return {name: module["format"] for name, module in contract.get("modules", {}).items()}


def _read_into_place(engine: StepEngine, reader: CheckpointReader) -> None:
    held = (ReadTarget(piece.kind, piece.name, piece.start, piece.data) for piece in _held_pieces(engine))
    replicated = (ReadTarget(kind, name, 0, tensor) for kind, name, tensor in _replicated_tensors(engine.module))
    reader.read_into(chain(held, replicated))


def _proofs(engine: StepEngine, reader: CheckpointReader) -> Iterator[TensorShard]:
    """What this rank answers for: the live tensors; of a frozen one that was cast, the saved values it was cast from.

    Raises:
        CheckpointError: a tensor is not what its saved values give when they are cast.
    """
    yield from _owned_pieces(engine)
    if engine.rank != 0:
        return
    dtypes = {(tensor.kind, tensor.name): tensor.dtype for tensor in reader.tensors}
    for piece in _replicated_pieces(engine):
        dtype = dtypes.get((piece.kind, piece.name), piece.dtype)
        if dtype == piece.dtype:
            yield piece
            continue
        for start in range(0, piece.stop, _CAST_ELEMENTS):
            live = piece.data[start : start + _CAST_ELEMENTS]
            stop = start + live.numel()
            values = reader.read(piece.kind, piece.name, start, stop)
            if not torch.equal(values.to(piece.dtype).view(torch.uint8), live.cpu().view(torch.uint8)):
                raise CheckpointError(
                    f"after loading {reader.path}, {piece.kind} '{piece.name}' differs from what was saved"
                )
            yield replace(piece, dtype=dtype, start=start, stop=stop, data=values)


def _owned_pieces(engine: StepEngine) -> Iterator[TensorShard]:
    """What this rank writes: its share of masters and moments, those of one parameter together."""
    for pieces in zip(*(engine.owned_shards(kind) for kind in _TRAINED), strict=True):
        yield from pieces


def _held_pieces(engine: StepEngine) -> Iterator[TensorShard]:
    """What this rank must load: all of them that it holds."""
    for kind in _TRAINED:
        yield from engine.local_shards(kind)


def _replicated_tensors(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, name, tensor) of what every rank holds in full: persistent buffers and frozen parameters."""
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        if name not in transient:
            yield "buffer", name, buffer.detach()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            yield "frozen", name, parameter.detach()


def _replicated_pieces(engine: StepEngine) -> Iterator[TensorShard]:
    for kind, name, tensor in _replicated_tensors(engine.module):
        flat = tensor.contiguous().view(-1)
        yield TensorShard(name, kind, tuple(tensor.shape), tensor.dtype, 0, flat.numel(), flat)


def _check_same_model(engine: StepEngine, reader: CheckpointReader) -> None:
    """Compares names, kinds, shapes and dtypes before anything is overwritten."""
    reader.require_kinds((*_TRAINED, "buffer", "frozen"))
    saved = {(t.kind, t.name): (tuple(t.shape), t.dtype) for t in reader.tensors if math.prod(t.shape)}
    live = {(kind, name): (shape, torch.float32) for name, shape in engine.shapes.items() for kind in _TRAINED}
    live |= {(kind, name): (tuple(t.shape), t.dtype) for kind, name, t in _replicated_tensors(engine.module)}
    live = {key: (shape, dtype) for key, (shape, dtype) in live.items() if math.prod(shape)}
    for kind, name in live.keys() - saved.keys():
        names = [other for other_kind, other in saved if other_kind == kind]
        raise CheckpointError(f"{reader.path} has no {kind} '{name}', which the model has{nearest(name, names)}")
    for kind, name in saved.keys() - live.keys():
        names = [other for other_kind, other in live if other_kind == kind]
        raise CheckpointError(f"{reader.path} holds {kind} '{name}', which the model lacks{nearest(name, names)}")
    for (kind, name), (shape, dtype) in live.items():
        saved_shape, saved_dtype = saved[kind, name]
        if saved_shape != shape:
            raise CheckpointError(
                f"{reader.path}: {kind} '{name}' has shape {list(saved_shape)}, the model's has {list(shape)}"
            )
        # the precision policy casts frozen weights, so theirs may be another one; values of a buffer are exact
        may_cast = kind == "frozen" and dtype.is_floating_point and saved_dtype.is_floating_point
        if saved_dtype != dtype and not may_cast:
            raise CheckpointError(
                f"{reader.path}: {kind} '{name}' was saved as {saved_dtype}, the model's is {dtype}; build the model "
                f"with the dtypes it was saved with"
            )
