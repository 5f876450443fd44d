"""Whole steps: eager ones until their kind is captured, then replays of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
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

_MAX_KINDS = 4  # that are captured; each has a pool of memory


class GraphedStep:
    """Runs whole training steps: the first ones of each kind eagerly, later ones from graphs, with the same bits.

    A kind is a number of micro-batches, the shapes and dtypes of their tensors, and their other values. Steps that a
    part looks into (a shadow step, a replayed audit, a measurement) run eagerly. All steps run on one stream.

    Args:
        own: of the engine.
        forward: returns the loss of a micro-batch, or an output that has it.

    Raises:
        ConfigError: no graph can hold the steps of the engine.
    """

    def __init__(self, own: StepInternals, forward: Callable[[Any], Any]) -> None:
        engine = own.engine
        _refuse(engine)
        self._own, self._forward = own, forward
        self._seen: dict[Any, int] = {}  # steps of each kind
        self._draws: dict[Any, list[Draw]] = {}
        self._captured: dict[Any, CapturedStep] = {}
        self._num_loads, self._pool = own.between.num_loads, captured.new_pool()
        self._stream: Any = torch.cuda.Stream(engine.device) if engine.device.type == "cuda" else None

    def __call__(self, batch: Sequence[Any], weights: Sequence[float] | None = None, **arguments: Any) -> StepOutcome:
        """Trains one step.

        Args:
            batch: this rank's micro-batches, trees of tensors on any device.
            weights: of the micro-batches; None: 1 each.
            arguments: of ``Engine.step``.

        Returns:
            What ``Engine.step`` returns.

        Raises:
            CheckpointError: an asynchronous save has failed; call it again.
            UsageError: the step does what no graph can hold, such as to read a value of the device.
        """
        batch, weights = list(batch), [1.0] * len(batch) if weights is None else list(weights)
        if self._stream is None:
            return self._run(batch, weights, arguments)
        caller = torch.cuda.current_stream(self._own.engine.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            outcome = self._run(batch, weights, arguments)
        caller.wait_stream(self._stream)
        return outcome

    def _run(self, batch: list[Any], weights: list[float], arguments: dict[str, Any]) -> StepOutcome:
        own, engine = self._own, self._own.engine
        own.finalize()
        own.parts.checkpointer.raise_reported()  # now: nothing of the step is done, so the caller can repeat it
        engine.busy.every = 0  # nothing inside a graph can be timed
        refuse_missed(own.run.missed_updates)
        if own.between.num_loads != self._num_loads:  # tensors may lie elsewhere
            self._captured.clear()
            self._num_loads, self._pool = own.between.num_loads, captured.new_pool()
        kind = _kind(engine, batch, weights)
        if 0 in weights or own.looks_into(engine.attempted_steps + 1):
            return self._eager(kind, batch, weights, arguments)
        if kind in self._captured:
            return self._captured[kind].replay(batch, weights, arguments)
        seen = self._seen[kind] = self._seen.get(kind, 0) + 1
        is_full = len(self._captured) == _MAX_KINDS
        if is_full and seen == WARM_UP + 1:
            logger.warning("engine.graph: %d kinds of steps have graphs, and those of one more run eagerly", _MAX_KINDS)
        if seen <= WARM_UP or is_full or own.parts.audit.is_pending:
            return self._eager(kind, batch, weights, arguments, is_checked=1 < seen <= WARM_UP)
        new = CapturedStep(own, self._pool, batch, weights, self._draws[kind])
        outcome = new.capture(self._forward, batch, weights, arguments)
        self._captured[kind] = new
        return outcome

    def _eager(
        self, kind: Any, batch: list[Any], weights: list[float], arguments: dict[str, Any], *, is_checked: bool = False
    ) -> StepOutcome:
        """Runs a step; if it is checked, no forward or backward may wait for the device."""
        engine = self._own.engine
        draws: list[Draw] = []
        places = iter(weights)
        with self._own.replaced(rng=partial(self._watched_rng, draws)):
            for micro in engine.accumulate(_on_device(batch, engine.device)):
                with _no_waits(engine.device) if is_checked else nullcontext():
                    engine.backward(self._forward(micro), weight=next(places))
        self._draws[kind] = draws
        return engine.step(**arguments)

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


@dataclass(frozen=True)
class _Shape:
    """A tensor of a kind of step."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _kind(engine: EngineHooks, batch: Sequence[Any], weights: Sequence[float]) -> Any:
    leaves, tree = pytree.tree_flatten(list(batch))
    shapes = tuple(_Shape(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves)
    return shapes, str(tree), tuple(weight == 1 for weight in weights), engine.module.training


def _on_device(batch: Sequence[Any], device: torch.device) -> list[Any]:
    def moved(tensor: Tensor) -> Tensor:
        return on_host(tensor, device).to(device, non_blocking=True)

    return list(pytree.tree_map_only(Tensor, moved, list(batch)))


@contextmanager
def _no_waits(device: torch.device) -> Iterator[None]:
    """Inside, an operation that makes the host wait for the device raises, with the line that calls it."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise UsageError(
            "engine.graph=true: the step waits for the device, at the line that the traceback above ends with; read no "
            "value of a tensor in the forward or in a hook, or set engine.graph=false"
        ) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _refuse(engine: EngineHooks) -> None:
    """Raises ``ConfigError`` for an engine whose steps no graph can hold."""
    reason = ""
    if not engine.options.engine.graph:
        reason = f"engine={engine.name} was set up without it; use dtrain.Native(graph=True)"
    elif engine.device.type != "cuda":
        reason = f"it needs a GPU, and this rank trains on {engine.device}"
    elif engine.options.blocks.offload_activations:
        reason = "copies of activations to the host lie in other memory in each step; set offload_activations=false"
    elif any(True for _ in running_statistics(engine.module)):
        reason = "after a skip the running statistics of a batch norm are put back from other memory in each step"
    elif engine.monitor.found is None:
        reason = "the vote must be Triton kernels; set optim.compile=true, AdamW(compile=True)"
    elif engine.explain_skips:
        reason = "explain_skips runs forwards again whose arguments a replay has overwritten"
    if reason:
        raise ConfigError(f"engine.graph=true: {reason}, or set engine.graph=false")
