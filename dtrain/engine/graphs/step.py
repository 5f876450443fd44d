"""Whole steps: eager ones until their kind is captured, then replays of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dtrain.distributed.logging import logger
from dtrain.engine.graphs import captured
from dtrain.engine.graphs.captured import CapturedStep
from dtrain.engine.graphs.internals import Draw, StepInternals, on_host, refuse_missed
from dtrain.engine.hooks import EngineHooks
from dtrain.engine.outcome import StepOutcome
from dtrain.engine.parts.running_statistics import running_statistics
from dtrain.engine.rng import generators_of, keyed_rng
from dtrain.errors import ConfigError, UsageError

WARM_UP = 3
"""Steps of a kind before it is captured: set-up, checks, and tables that are built when they are first needed."""

_MAX_KINDS, _MAX_SEEN = 4, 64  # that are captured, and that are counted


class GraphedStep:
    """Runs whole training steps: the first ones of each kind eagerly, later ones from graphs, with the same bits.

    A kind is a number of micro-batches, the layout of their tensors, their other values, whether all weights are 1, and
    the modes of the modules. Steps that a part looks into (an audit's check, a shadow step, a measurement), and those
    with a weight of 0 or a parameter without a gradient on this rank, run eagerly. All steps run on one stream.

    Args:
        own: of the engine.
        forward: returns the loss of a micro-batch, or an output that has it.

    Raises:
        ConfigError: no graph can hold the steps of the engine.
    """

    def __init__(self, own: StepInternals, forward: Callable[[Any], Any]) -> None:
        _refuse(own.engine)
        self._own, self._forward = own, forward
        self._seen: dict[Any, int] = {}  # complete eager steps of each kind
        self._draws: dict[Any, list[Draw]] = {}  # of the last one
        self._captured: dict[Any, CapturedStep] = {}
        self._num_loads, self._pool = own.between.num_loads, captured.new_pool()
        device = own.engine.device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Sequence[Any], weights: Sequence[float] | None = None, **arguments: Any) -> StepOutcome:
        """Trains one step.

        Args:
            batch: this rank's micro-batches, trees of tensors on any device. Pinned memory may be written again once a
                field of the outcome has been read.
            weights: of the micro-batches, numbers; None: 1 each.
            arguments: of ``Engine.step``.

        Returns:
            What ``Engine.step`` returns.

        Raises:
            CheckpointError: an asynchronous save has failed; call it again.
            UsageError: the step does what no graph can hold, such as to read a value of the device.
        """
        batch, weights = list(batch), [1.0] * len(batch) if weights is None else list(weights)
        if len(weights) != len(batch) or any(isinstance(weight, Tensor) for weight in weights):
            raise UsageError(f"graphed_step got weights={weights!r}; expected {len(batch)} numbers, one a micro-batch")
        if self._stream is None:
            return self._run(batch, weights, arguments)
        caller = torch.cuda.current_stream(self._own.engine.device)
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream):
                return self._run(batch, weights, arguments)
        finally:
            caller.wait_stream(self._stream)

    def _run(self, batch: list[Any], weights: list[float], arguments: dict[str, Any]) -> StepOutcome:
        own, engine = self._own, self._own.engine
        own.finalize()
        own.parts.checkpointer.raise_reported()  # now: nothing of the step is done, so the caller can repeat it
        engine.busy.every = 0  # nothing inside a graph can be timed
        refuse_missed(own.run.missed_updates)
        if engine.explain_skips:
            raise UsageError(
                "engine.graph=true: explain_skips would run forwards again whose arguments a replay has overwritten; "
                "set engine.explain_skips=False, or engine.graph=false"
            )
        if own.between.num_loads != self._num_loads:
            self._captured.clear()
            self._num_loads, self._pool = own.between.num_loads, captured.new_pool()
        kind = _kind(engine, batch, weights)
        if 0 in weights or own.looks_into(engine.attempted_steps + 1):
            return self._eager(None, batch, weights, arguments)
        if kind in self._captured:
            return self._captured[kind].replay(batch, weights, arguments)
        seen = self._seen.get(kind, 0)
        if seen < WARM_UP or len(self._captured) == _MAX_KINDS:
            return self._eager(kind, batch, weights, arguments)
        new = CapturedStep(own, self._pool, batch, weights, self._draws[kind])
        outcome = new.capture(self._forward, batch, weights, arguments)
        self._captured[kind] = new
        return outcome

    def _eager(self, kind: Any, batch: list[Any], weights: list[float], arguments: dict[str, Any]) -> StepOutcome:
        """Runs a step; those of a ``kind`` count for its capture."""
        own, engine = self._own, self._own.engine
        draws: list[Draw] = []
        before = _buffers(engine)
        with own.replaced(rng=partial(self._watched_rng, draws)):
            for micro, weight in zip(engine.accumulate(_on_device(batch, engine.device)), weights, strict=True):
                engine.backward(self._forward(micro), weight=weight)
        if new := [name for name, place in _buffers(engine).items() if before.get(name) != place]:
            raise UsageError(
                f"engine.graph=true: the forward assigns the buffer '{new[0]}', which a replay would not; write into "
                f"it (self.{new[0].rpartition('.')[2]}.copy_(...)), or set engine.graph=false"
            )
        is_whole = not own.ballot.missed.names
        outcome = engine.step(**arguments)
        if kind is not None and is_whole and (kind in self._seen or len(self._seen) < _MAX_SEEN):
            self._seen[kind], self._draws[kind] = self._seen.get(kind, 0) + 1, draws
            if self._seen[kind] == WARM_UP + 1 or len(self._seen) == _MAX_SEEN:  # never captured
                logger.warning(
                    "engine.graph: %d kinds of steps have graphs, others run eagerly; a kind has tensors of the same "
                    "shapes, and the same other values",
                    len(self._captured),
                )
        return outcome

    @contextmanager
    def _watched_rng(self, draws: list[Draw], device: torch.device, key: int) -> Iterator[None]:
        """Notes in ``draws`` whether the forward draws random numbers."""
        with keyed_rng(device, key):
            generators = generators_of(device)
            before = list(map(_state, generators))
            yield
            drew = [old != _state(generator) for old, generator in zip(before, generators, strict=True)]
        if drew[-1]:
            draws.append(self._own.forward_under_way)
        recomputes = self._own.engine.options.blocks.recompute != "none"
        if (drew[0] and device.type == "cuda") or (drew[-1] and recomputes):
            what = "with recomputation, which would draw others" if drew[-1] else "of the CPU, which would not change"
            raise UsageError(
                f"engine.graph=true: the forward draws random numbers {what}; draw none, or set engine.graph=false"
            )


def _state(generator: torch.Generator) -> bytes:
    found: bytes = generator.get_state().numpy().tobytes()
    return found


def _buffers(engine: EngineHooks) -> dict[str, int]:
    return {name: id(buffer) for name, buffer in engine.module.named_buffers()}


def _kind(engine: EngineHooks, batch: list[Any], weights: Sequence[float]) -> Any:
    leaves, tree = pytree.tree_flatten(batch)
    modes = tuple(module.training for module in engine.module.modules())
    return tuple(map(_value, leaves)), str(tree), all(weight == 1 for weight in weights), modes


def _value(value: Any) -> Any:
    """Returns what of a batch a graph holds."""
    if isinstance(value, Tensor) and not value.requires_grad:
        return value.size(), value.stride(), value.dtype
    if isinstance(value, Tensor) or not isinstance(value, Hashable):
        what = "a tensor that needs a gradient" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise UsageError(f"engine.graph=true: a micro-batch holds {what}; expected tensors without, and plain values")
    return value


def _on_device(batch: list[Any], device: torch.device) -> list[Any]:
    def moved(tensor: Tensor) -> Tensor:
        return on_host(tensor, device).to(device, non_blocking=True)

    return list(pytree.tree_map_only(Tensor, moved, batch))


def _refuse(engine: EngineHooks) -> None:
    """Raises ``ConfigError`` for an engine whose steps no graph can hold."""
    reason = ""
    if not engine.options.engine.graph:
        reason = f"engine={engine.name} was set up without it; use dtrain.Native(graph=True)"
    elif engine.device.type != "cuda":
        reason = f"it needs a GPU, and this rank trains on {engine.device}; set engine.graph=false"
    elif engine.options.blocks.offload_activations:
        reason = (
            "copies of activations on the host lie in other memory in each step; set offload_activations=false, or "
            "engine.graph=false"
        )
    elif any(True for _ in running_statistics(engine.module)):
        reason = (
            "after a skip the running statistics of a batch norm are put back from other memory in each step; use "
            "another norm, or set engine.graph=false"
        )
    elif engine.monitor.found is None:
        reason = "the vote must be Triton kernels; set optim.compile=true, AdamW(compile=True), or engine.graph=false"
    if reason:
        raise ConfigError(f"engine.graph=true: {reason}")
