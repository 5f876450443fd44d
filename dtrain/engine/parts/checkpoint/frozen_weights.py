"""Frozen weights in checkpoints: saved, or named by their source; FP8 ones as the BF16 values that they represent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from dtrain.checkpoint import CheckpointReader, ReadTarget
from dtrain.checkpoint.format.training_state import TrainingState
from dtrain.checkpoint.frozen_source import FrozenSource
from dtrain.checkpoint.snapshot import TensorShard
from dtrain.distributed.consensus import on_every_rank
from dtrain.errors import CheckpointError
from dtrain.parameters.model_states import ModelStates


def check_source(state: TrainingState, path: str, own: FrozenSource | None) -> bool:
    """Returns whether the checkpoint names the source of its frozen weights, and holds none of them.

    Raises:
        CheckpointError: it is not the engine's own source.
    """
    saved = state.source
    if saved is None:
        return False
    if own is None:
        raise CheckpointError(
            f"{path} holds no frozen weights, they are those of {saved}; this engine has no frozen_source, or its "
            f"frozen weights were written to: give dtrain.initialize(..., frozen_source=dtrain.FrozenSource(folder))"
        )
    if own.sha256 != saved.sha256:
        raise CheckpointError(
            f"{path} was trained over the frozen weights of {saved}, this run has those of {own}: the safetensors "
            f"files in the folder are others, more or fewer; resume over the same"
        )
    return True


def saved_float8(states: ModelStates) -> Iterator[TensorShard]:
    """Yields this rank's part of the frozen weights that are held in FP8, in BF16, which has their values exactly."""
    for weights in states.frozen_float8:
        yield from weights.saved_shards()


def read_float8(reader: CheckpointReader, states: ModelStates) -> None:
    """Casts the saved values of the frozen FP8 weights; all ranks call."""
    for weights in states.frozen_float8:
        values = weights.new_values()
        targets = [ReadTarget(shard.kind, shard.name, shard.start, shard.data) for shard in weights.shards(values)]
        # agreed on before the cast, in which the ranks communicate
        on_every_rank(states.comm, f"reading {reader.path}", partial(reader.read_into, targets), CheckpointError)
        weights.write(values)


def proven_float8(reader: CheckpointReader, states: ModelStates) -> Iterator[TensorShard]:
    """Yields the saved values of which this rank's frozen FP8 weights are the cast, those that it would save.

    Raises:
        CheckpointError: they are not.
    """
    for weights in states.frozen_float8:
        values = weights.new_values()
        for shard in weights.shards(values):
            saved = reader.read(shard.kind, shard.name, shard.start, shard.stop)
            shard.data.copy_(saved)
            if weights.is_saved_here:
                yield replace(shard, dtype=saved.dtype, values=saved)
        if not weights.is_cast_of(values):
            raise CheckpointError(
                f"after loading {reader.path}, the frozen FP8 weights of '{weights.name}' "
                f"({', '.join(weights.names[:3])}, ...) are not the cast of what was saved"
            )
