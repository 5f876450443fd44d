"""Between an engine's tensors and the logical tensors of a checkpoint."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dtrain import checkpoint
from dtrain.checkpoint import CheckpointReader, Piece, Snapshot
from dtrain.errors import CheckpointError, nearest
from dtrain.sharding.layout import Interval
from dtrain.sharding.param_group import aliases

if TYPE_CHECKING:
    from dtrain.engine.native import NativeEngine


def save(
    engine: NativeEngine,
    directory: Path,
    *,
    extra: Mapping[str, Any] | None,
    config: Mapping[str, Any] | None,
    keep_last: int,
) -> Path:
    """Writes what this rank owns; see :meth:`dtrain.engine.base.Engine.save`."""
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
        },
        "rng": {"seed": engine.seed, "keyed_by": ["seed", "attempted_steps", "global_micro_batch"]},
        "data_cursor": engine.data_cursor,
        "aliases": aliases(engine.module),
        "config": dict(config or {}),
        "extra": dict(extra or {}),
    }
    snapshot = Snapshot(engine.attempted_steps, tuple(pieces), state)
    return checkpoint.save(directory, snapshot, engine.comm, keep_last=keep_last)


def load(engine: NativeEngine, path: Path) -> dict[str, Any]:
    """Fills this rank's tensors from a verified checkpoint; returns its ``extra``."""
    reader = checkpoint.open_newest(path, engine.comm)
    _check_same_model(engine, reader)
    for piece in _held_pieces(engine):
        piece.data.copy_(reader.read(piece.kind, piece.name, piece.start, piece.stop))
    for kind, name, tensor in _replicated_tensors(engine.module):
        tensor.copy_(reader.read(kind, name).view(tensor.shape))
    owned = [*_owned_pieces(engine)]
    if engine.rank == 0:
        owned += _replicated_pieces(engine)
    reader.check_fingerprints(owned, engine.comm)
    saved = reader.state["engine_state"]
    engine.attempted_steps = int(saved["attempted_steps"])
    engine.applied_steps = int(saved["applied_steps"])
    engine.loss_scale = engine.loss_scale.restored(saved["loss_scale"])
    engine.data_cursor = int(reader.state["data_cursor"])
    engine.seed = int(reader.state["rng"]["seed"])
    engine.run_id = str(reader.state["run_id"])
    extra: dict[str, Any] = reader.state["extra"]
    return extra


def _owned_pieces(engine: NativeEngine) -> Iterator[Piece]:
    """What this rank writes: its shard of masters and moments, at every stage."""
    yield from _pieces(engine, engine.state.owned_intervals())


def _held_pieces(engine: NativeEngine) -> Iterator[Piece]:
    """What this rank must load: all that lies in its arena."""
    yield from _pieces(engine, engine.state.held_intervals())


def _pieces(engine: NativeEngine, intervals: Iterator[tuple[Interval, int]]) -> Iterator[Piece]:
    state = engine.state
    arenas = {"master": state.master, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
    for part, place in intervals:
        for kind, arena in arenas.items():
            data = arena[place : place + part.stop - part.start]
            yield Piece(part.spec.name, kind, part.spec.shape, torch.float32, part.start, part.stop, data)


def _replicated_tensors(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, name, tensor) of what every rank holds in full: persistent buffers and frozen parameters."""
    persistent = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield "buffer", name, buffer.detach()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            yield "frozen", name, parameter.detach()


def _replicated_pieces(engine: NativeEngine) -> Iterator[Piece]:
    for kind, name, tensor in _replicated_tensors(engine.module):
        flat = tensor.contiguous().view(-1)
        yield Piece(name, kind, tuple(tensor.shape), tensor.dtype, 0, flat.numel(), flat)


def _check_same_model(engine: NativeEngine, reader: CheckpointReader) -> None:
    """Compares names, shapes and kinds before anything is overwritten."""
    reader.require_kinds(("master", "exp_avg", "exp_avg_sq", "buffer", "frozen"))
    saved = {(t.kind, t.name): tuple(t.shape) for t in reader.tensors if math.prod(t.shape)}
    live = {
        (kind, slot.spec.name): slot.spec.shape
        for layout in engine.state.layouts
        for slot in layout.slots
        for kind in ("master", "exp_avg", "exp_avg_sq")
    }
    live |= {(kind, name): tuple(tensor.shape) for kind, name, tensor in _replicated_tensors(engine.module)}
    live = {key: shape for key, shape in live.items() if math.prod(shape)}
    for kind, name in live.keys() - saved.keys():
        names = [other for other_kind, other in saved if other_kind == kind]
        raise CheckpointError(f"{reader.path} has no {kind} '{name}', which the model has{nearest(name, names)}")
    for kind, name in saved.keys() - live.keys():
        names = [other for other_kind, other in live if other_kind == kind]
        raise CheckpointError(f"{reader.path} holds {kind} '{name}', which the model lacks{nearest(name, names)}")
    for key, shape in live.items():
        if saved[key] != shape:
            raise CheckpointError(
                f"{reader.path}: {key[0]} '{key[1]}' has shape {list(saved[key])}, the model's has {list(shape)}"
            )
