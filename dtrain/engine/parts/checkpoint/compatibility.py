"""Checks of a checkpoint against an engine: differences that are refused, and those that only warn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from dtrain.checkpoint import CheckpointReader
from dtrain.checkpoint.format.training_state import TrainingState
from dtrain.checkpoint.names import plain_name
from dtrain.distributed.logging import logger
from dtrain.engine.parts.buffers import persistent_buffers
from dtrain.engine.parts.checkpoint.frozen_weights import check_source
from dtrain.errors import CheckpointError, nearest
from dtrain.optim.average import EMA
from dtrain.parameters.model_states import MASTER, ModelStates

_FLOAT8_BITS = ("recipe", "grad_format", "emulate", "fast_accumulation")
"""The FP8 options that the bits of a product follow from."""


def replicated_tensors(states: ModelStates, *, has_frozen: bool) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (kind, name, tensor) of what every rank holds in full: persistent buffers and frozen parameters.

    ``has_frozen``: whether the checkpoint holds the latter.
    """
    for name, buffer in persistent_buffers(states.module, states.modules):
        yield "buffer", name, buffer
    for name, parameter in states.replicated_frozen().items() if has_frozen else ():
        yield "frozen", name, parameter


def tensor_names(states: ModelStates) -> list[str]:
    """Returns the names of the parameters and persistent buffers in the model."""
    return [*states.shapes, *states.frozen, *(name for name, _ in persistent_buffers(states.module, states.modules))]


def training_state(reader: CheckpointReader) -> TrainingState:
    """Returns the state of the engine that saved a checkpoint; raises ``CheckpointError`` if no engine did."""
    if reader.training is None:
        raise CheckpointError(
            f"{reader.path} holds no state of an engine, only tensors, as dtrain.checkpoint.save writes them; load one "
            f"that engine.save has written"
        )
    return reader.training


def check_same_model(reader: CheckpointReader, states: ModelStates) -> None:
    dtypes = states.saved_dtypes
    reader.require_kinds((*dtypes, "buffer", "frozen"))
    saved = {(t.kind, t.name): (tuple(t.shape), t.dtype) for t in reader.tensors if math.prod(t.shape)}
    kinds = trained_kinds(reader, states)
    live = {
        (kind, name): (shape, dtypes[kind])
        for name, shape in states.shapes.items()
        for kind in (MASTER, *states.plan.kinds(name))
        if kind in kinds
    }
    has_frozen = not check_source(training_state(reader), str(reader.path), states.frozen_source)
    replicated = replicated_tensors(states, has_frozen=has_frozen)
    live |= {(kind, name): (tuple(t.shape), t.dtype) for kind, name, t in replicated}
    if has_frozen:
        live |= {("frozen", name): (tuple(p.shape), p.dtype) for name, p in states.frozen.items()}
    live = {key: (shape, dtype) for key, (shape, dtype) in live.items() if math.prod(shape)}
    for kind, name in live.keys() - saved.keys():
        names = [other for other_kind, other in saved if other_kind == kind]
        if kind in states.plan.specs and (MASTER, name) in saved:
            raise CheckpointError(
                f"{reader.path} has no {kind} of '{name}', which the optimizer keeps; resume with the optimizer and "
                f"the groups that it was saved with"
            )
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
        if saved_dtype != dtype and kind in dtypes:
            raise CheckpointError(
                f"{reader.path}: {kind} '{name}' was saved as {saved_dtype}, the optimizer keeps it in {dtype}; resume "
                f"with the optimizer that it was saved with"
            )
        if saved_dtype != dtype and not may_cast:
            raise CheckpointError(
                f"{reader.path}: {kind} '{name}' was saved as {saved_dtype}, the model's is {dtype}; build the model "
                f"with the dtypes it was saved with"
            )


def trained_kinds(reader: CheckpointReader, states: ModelStates) -> list[str]:
    """Returns the kinds of trained tensors to load: masters and all states, or masters alone before the first update.

    An imported model has masters alone; its states have their initial values.

    Raises:
        CheckpointError: a state of the optimizer is missing.
    """
    saved = {tensor.kind for tensor in reader.tensors}
    kinds = list(states.plan.specs)
    if EMA.name not in saved and EMA.name in kinds:  # the average starts from the loaded weights
        kinds.remove(EMA.name)
    missing = [name for name in kinds if name not in saved]
    if not missing or MASTER not in saved:
        return [MASTER, *kinds]
    if missing == kinds and training_state(reader).engine_state.applied_steps == 0:
        return [MASTER]
    raise CheckpointError(
        f"{reader.path} holds no {' and no '.join(map(repr, missing))}, the state that "
        f"{type(states.plan.record).__name__} keeps; resume with the optimizer that it was saved with"
    )


def warn_of_other_bits(reader: CheckpointReader, states: ModelStates) -> None:
    if states.plan.ema_decay is not None and all(tensor.kind != EMA.name for tensor in reader.tensors):
        logger.warning(f"{reader.path} holds no moving average of the weights; it starts from the loaded ones")
    state = training_state(reader)
    saved, own = state.optimizer.get("compile"), states.plan.is_compiled
    if saved is not None and saved != own:
        logger.warning(
            f"{reader.path} was saved with optim.compile={str(saved).lower()}, this run has {str(own).lower()}: the "
            f"two updates round differently, so the run resumes, but not bit for bit"
        )
    contracts = (state.contract or {}, states.contract.to_dict())
    before, now = map(_formats, contracts)
    saved_options, own_options = (contract.get("float8") for contract in contracts)
    finish = ("fp8", (saved_options or {}).get("finish_in"))  # of which the run's own log says where it begins
    changed = [name for name in now if before.get(name, now[name]) != now[name] and (before[name], now[name]) != finish]
    if changed:
        listed = ", ".join(f"'{name}' in {before[name]} (now {now[name]})" for name in changed[:3])
        logger.warning(
            f"{reader.path} was saved with {listed}{', ...' if changed[3:] else ''}: {len(changed)} modules compute in "
            f"another format, so the run resumes, but not bit for bit"
        )
    if saved_options and own_options:
        others = {key: saved_options.get(key) for key in _FLOAT8_BITS if saved_options.get(key) != own_options[key]}
        if others:
            listed = ", ".join(f"{key}={value} (now {own_options[key]})" for key, value in others.items())
            logger.warning(
                f"{reader.path} was saved with float8 {listed}: FP8 products round differently, so the run resumes, "
                f"but not bit for bit"
            )


def _formats(contract: Mapping[str, Any]) -> dict[str, str]:
    """Returns the format of each module; empty for a checkpoint without them."""
    return {plain_name(name): module["format"] for name, module in contract.get("modules", {}).items()}
