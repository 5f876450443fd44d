"""Replays training steps from CUDA graphs, with the vote of all ranks and the skip inside.

A step is captured as two graphs: forwards, backwards, reductions, vote and decision; then update, casts and gathers.
Between them the copy of the decision to the host is queued. So the host reads it while the device updates, and has
queued the next step before the device needs it. The update reads the decision on the device, so a skipped step is
replayed like any other; the search for its culprit runs after it, as always.

[Note: what changes from step to step] A graph holds the addresses and the arguments of its kernels. What changes from
step to step is read from memory that stays:

- The host sends one record of words (``Ballot.words``): loss scale, clipping threshold, learning rates, bias
  corrections, and what the ranks compare.
- Batches and weights are copied into tensors of the graph.
- A forward that draws random numbers has a generator of its own, registered with the graph. The host seeds it.

Memory that a step needs for itself comes from the graph's pool. States, replicas and main grads never move. What the
host does beside its launches, such as the rolling hash of collectives, is done again for each replay.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dtrain.distributed.logging import logger
from dtrain.distributed.schedule import Issued
from dtrain.engine.forward import ModelForward
from dtrain.engine.micro_batch import MicroBatches
from dtrain.engine.outcome import StepOutcome
from dtrain.engine.parts.order import EngineParts
from dtrain.engine.parts.part import StepUnderWay, StepWork
from dtrain.engine.parts.running_statistics import running_statistics
from dtrain.engine.rng import generators_of, keyed_rng, rng_key
from dtrain.engine.run_state import RunState
from dtrain.engine.vote.ballot import Ballot
from dtrain.engine.vote.decide import Decision
from dtrain.engine.vote.losses import LossAccumulator
from dtrain.engine.vote.record import COLUMNS, pinned
from dtrain.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from dtrain.engine.step import StepEngine

WARM_UP = 3
"""Steps of a kind before it is captured: set-up, checks, and tables that are built when they are first needed."""

_MAX_KINDS = 4  # that are captured; each has a pool of memory

_new_graph: Callable[[], Any] = torch.cuda.CUDAGraph


class _Draw(NamedTuple):
    """A forward that draws random numbers: its micro-batch, and the number of earlier forwards of that."""

    micro_batch: int
    call: int


@dataclass(frozen=True)
class StepInternals:
    """What a captured step needs of its engine; ``finalize`` finalizes the last step."""

    engine: StepEngine
    batch: MicroBatches
    losses: LossAccumulator
    ballot: Ballot
    forward: ModelForward
    parts: EngineParts
    run: RunState
    finalize: Callable[[], None]

    @property
    def forward_under_way(self) -> _Draw:
        """The forward that runs now."""
        return _Draw(self.batch.current.number, self.batch.current.num_forwards - 1)

    @contextmanager
    def replaced(self, **changes: Any) -> Iterator[None]:
        """Inside, the engine has another ``work`` or ``scale``, its ballot another ``send``, its forward other RNGs."""
        owners: dict[str, Any] = {"work": self.engine, "scale": self.engine, "send": self.ballot, "rng": self.forward}
        before = {name: getattr(owners[name], name) for name in changes}
        try:
            for name, value in changes.items():
                setattr(owners[name], name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(owners[name], name, value)

    def looks_into(self, step: int) -> bool:
        """Whether something looks into ``step``, counted from 1, or computes what a graph does not hold."""
        parts, engine = self.parts, self.engine
        is_observed = engine.explain_skips or parts.forwards.keeps(step) or parts.samples.is_measuring
        return is_observed or engine.loss_scale.is_calibrating


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
        self._draws: dict[Any, list[_Draw]] = {}
        self._captured: dict[Any, _CapturedStep] = {}
        self._num_loads = engine.num_loads
        self._stream: Any = torch.cuda.Stream(engine.device) if engine.device.type == "cuda" else None
        engine.busy.every = 0  # nothing inside a graph can be timed

    def __call__(self, batch: Sequence[Any], weights: Sequence[float] | None = None, **arguments: Any) -> StepOutcome:
        """Trains one step.

        Args:
            batch: this rank's micro-batches, trees of tensors on any device.
            weights: of the micro-batches; None: 1 each.
            arguments: of ``Engine.step``.

        Returns:
            What ``Engine.step`` returns.

        Raises:
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
        _refuse_missed(own.run.missed_updates)
        if engine.num_loads != self._num_loads:  # tensors may lie elsewhere
            self._num_loads = engine.num_loads
            self._captured.clear()
        kind = _kind(engine, batch, weights)
        if 0 in weights or own.looks_into(engine.attempted_steps + 1):
            return self._eager(kind, batch, weights, arguments)
        if kind in self._captured:
            return self._captured[kind].replay(batch, weights, arguments)
        seen = self._seen[kind] = self._seen.get(kind, 0) + 1
        if seen <= WARM_UP or len(self._captured) == _MAX_KINDS or own.parts.audit.is_pending:
            return self._eager(kind, batch, weights, arguments, is_checked=1 < seen <= WARM_UP)
        captured = self._captured[kind] = _CapturedStep(own, batch, weights, self._draws[kind])
        return captured.capture(self._forward, batch, weights, arguments)

    def _eager(
        self, kind: Any, batch: list[Any], weights: list[float], arguments: dict[str, Any], *, is_checked: bool = False
    ) -> StepOutcome:
        """Runs a step; if it is checked, no forward or backward may wait for the device."""
        engine = self._own.engine
        draws: list[_Draw] = []
        places = iter(weights)
        with self._own.replaced(rng=partial(self._watched_rng, draws)):
            for micro in engine.accumulate(_on_device(batch, engine.device)):
                with _no_waits(engine.device) if is_checked else nullcontext():
                    engine.backward(self._forward(micro), weight=next(places))
        self._draws[kind] = draws
        return engine.step(**arguments)

    @contextmanager
    def _watched_rng(self, draws: list[_Draw], device: torch.device, key: int) -> Iterator[None]:
        """Notes in ``draws`` whether the forward draws random numbers."""
        with keyed_rng(device, key):
            generators = generators_of(device)
            before = list(map(_state, generators))
            yield
            drew = [old != _state(generator) for old, generator in zip(before, generators, strict=True)]
        if drew[-1]:
            draws.append(self._own.forward_under_way)
        if drew[0] and device.type == "cuda":
            raise UsageError(
                "engine.graph=true: the forward draws random numbers from torch's generator of the CPU, which a graph "
                "would repeat in each step; draw them on the device, or set engine.graph=false"
            )


class _CapturedStep:
    """The graphs of one kind of step, and the memory that the host writes before a replay."""

    def __init__(self, own: StepInternals, batch: list[Any], weights: Sequence[float], draws: Sequence[_Draw]) -> None:
        device = own.engine.device
        self._own = own
        self._votes, self._updates = _new_graph(), _new_graph()
        self._inputs = pytree.tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device=device), batch)
        self._weights = [None if weight == 1 else torch.empty((), device=device) for weight in weights]
        self._record = _Record(own.ballot.num_words(len(batch)), device)
        self._draws = {draw: generators_of(device)[-1].clone_state() for draw in draws}
        for generator in self._draws.values():
            self._votes.register_generator_state(generator)
        self._kept = own.losses.values()  # whose memory the engine replaces if a step has more micro-batches
        self._issued: list[Issued] = []  # collectives: of the micro-batches, of the vote, of the update
        self._received: set[int] = set()
        self._open: Any = None  # the graph that is captured now
        self._result: tuple[Decision, Tensor] | None = None

    def _fill(self, batch: list[Any], weights: Sequence[float]) -> None:
        """Copies what a step computes with into the memory of the graph."""
        engine = self._own.engine
        for target, given in zip(pytree.tree_leaves(self._inputs), pytree.tree_leaves(batch), strict=True):
            if isinstance(target, Tensor):
                target.copy_(_pinned(given, target.device), non_blocking=True)
        for place, weight in zip(self._weights, weights, strict=True):
            if place is not None:
                place.fill_(weight)
        for draw, generator in self._draws.items():
            index = draw.micro_batch * engine.world_size + engine.rank
            generator.manual_seed(rng_key(engine.seed, engine.attempted_steps, index, draw.call))

    # -- replay ------------------------------------------------------------------------------------------------------

    def replay(self, batch: list[Any], weights: Sequence[float], arguments: dict[str, Any]) -> StepOutcome:
        """Runs one step from the graphs."""
        own = self._own
        self._fill(batch, weights)
        own.parts.gradients.before_backward()
        own.losses.micro_batches[:] = range(len(batch))
        own.engine.monitor.received |= self._received
        own.parts.gradients.after_backward()
        with own.replaced(work=StepWork(lambda: None, self._replay_vote, self._replay_update)):
            return own.engine.step(**arguments)

    def _replay_vote(self, step: StepUnderWay) -> tuple[Decision, Tensor]:
        assert self._result is not None
        schedule = self._own.engine.comm.schedule
        schedule.repeat(self._issued[0])
        self._record.write(self._own.ballot.words(step))
        self._record.send()
        self._votes.replay()
        schedule.repeat(self._issued[1])
        return self._result

    def _replay_update(self, step: StepUnderWay, decision: Decision) -> None:
        self._updates.replay()
        self._own.engine.comm.schedule.repeat(self._issued[2])

    # -- capture -----------------------------------------------------------------------------------------------------

    def capture(
        self, forward: Callable[[Any], Any], batch: list[Any], weights: Sequence[float], arguments: dict[str, Any]
    ) -> StepOutcome:
        """Runs one step, and captures what it launches; the device runs each graph when it is complete."""
        engine = self._own.engine
        self._fill(batch, weights)
        if engine.device.type == "cuda":
            gc.collect()  # what it frees would end inside the capture
            torch.cuda.synchronize(engine.device)
            torch.cuda.empty_cache()
        launched = engine.work
        work = StepWork(launched.reduce, partial(self._capture_vote, launched), partial(self._capture_update, launched))
        places = iter(self._weights)
        try:
            with self._own.replaced(work=work, send=self._send, scale=self._scale, rng=self._captured_rng):
                self._begin(self._votes)
                self._note_collectives()
                for micro in engine.accumulate(self._inputs):
                    place = next(places)
                    engine.backward(forward(micro), weight=1.0 if place is None else place)
                outcome = engine.step(**arguments)
        except BaseException as error:
            if self._open is not None:  # else each later operation on the stream would fail
                with suppress(RuntimeError):
                    self._open.capture_end()
            if not isinstance(error, RuntimeError):
                raise
            reason = str(error).partition("\n")[0]
            raise UsageError(
                f"engine.graph=true: the step cannot be captured ({reason}); it may not read a value of the device, "
                f"nor launch other work for other values; set engine.graph=false"
            ) from error
        logger.info("captured a step of %d micro-batches; later ones of its shapes are replayed", len(batch))
        return outcome

    def _begin(self, graph: Any, **pool: Any) -> None:
        # threads of NCCL and of the loader may do meanwhile what a capture forbids
        graph.capture_begin(capture_error_mode="thread_local", **pool)
        self._open = graph

    def _end(self, graph: Any) -> None:
        self._open = None
        graph.capture_end()

    def _note_collectives(self) -> None:
        self._issued.append(self._own.engine.comm.schedule.note())

    def _scale(self) -> Tensor:
        return self._record.words[COLUMNS["loss_scale"]].view(torch.float64).float()

    def _send(self, words: Sequence[int]) -> Tensor:
        self._note_collectives()
        return self._record.write(words)

    def _capture_vote(self, launched: StepWork, step: StepUnderWay) -> tuple[Decision, Tensor]:
        self._received = set(self._own.engine.monitor.received)
        _refuse_missed(self._own.ballot.missed.names)
        self._result = launched.vote(step)
        self._end(self._votes)
        self._record.send()
        self._votes.replay()
        return self._result

    def _capture_update(self, launched: StepWork, step: StepUnderWay, decision: Decision) -> None:
        self._note_collectives()
        self._begin(self._updates, pool=self._votes.pool())
        launched.update(step, decision)
        self._end(self._updates)
        self._own.engine.comm.schedule.noted = None
        self._updates.replay()

    @contextmanager
    def _captured_rng(self, device: torch.device, key: int) -> Iterator[None]:
        """Draws from the generator of this forward, which is registered with the graph."""
        generator = self._draws.get(self._own.forward_under_way)
        if generator is None:  # it draws nothing
            yield
            return
        current = generators_of(device)[-1]
        before = current.graphsafe_get_state()
        current.graphsafe_set_state(generator)
        try:
            yield
        finally:
            current.graphsafe_set_state(before)


class _Record:
    """Words that the host sends to a fixed place on the device; ``words`` is int64 [n] there."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.words = torch.empty(num_words, dtype=torch.int64, device=device)
        self._values: Sequence[int] = ()

    def write(self, words: Sequence[int]) -> Tensor:
        """Keeps ``words`` for ``send``; returns their place."""
        self._values = words
        return self.words

    def send(self) -> None:
        self.words.copy_(pinned(self._values, self.words.device), non_blocking=True)


def _state(generator: torch.Generator) -> bytes:
    found: bytes = generator.get_state().numpy().tobytes()
    return found


@dataclass(frozen=True)
class _Shape:
    """A tensor of a kind of step."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _kind(engine: StepEngine, batch: Sequence[Any], weights: Sequence[float]) -> Any:
    leaves, tree = pytree.tree_flatten(list(batch))
    shapes = tuple(_Shape(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves)
    return shapes, str(tree), tuple(weight == 1 for weight in weights), engine.module.training


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns ``tensor`` where a copy to ``device`` makes nobody wait."""
    is_pageable = device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned()
    return tensor.pin_memory() if is_pageable else tensor


def _on_device(batch: Sequence[Any], device: torch.device) -> list[Any]:
    def moved(tensor: Tensor) -> Tensor:
        return _pinned(tensor, device).to(device, non_blocking=True)

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


def _refuse_missed(names: Collection[str]) -> None:
    if names:
        raise UsageError(
            f"engine.graph=true: {len(names)} parameters have had no gradient in a step, such as "
            f"'{next(iter(names))}', and a graph updates all by the same numbers; freeze them, or set engine.graph=false"
        )


def _refuse(engine: StepEngine) -> None:
    """Raises ``ConfigError`` for an engine whose steps no graph can hold."""
    blocks = engine.options.blocks
    reason = ""
    if not getattr(engine.options.engine, "graph", False):
        reason = f"engine={engine.name} was set up without it; use engine=native, graph=true"
    elif engine.device.type != "cuda":
        reason = f"it needs a GPU, and this rank trains on {engine.device}"
    elif blocks.offload_activations:
        reason = "offload_activations copies to the host, in memory that changes; set it to false"
    elif blocks.recompute != "none" and any(
        isinstance(m, nn.modules.dropout._DropoutNd) for m in engine.module.modules()
    ):
        reason = "recomputation keeps the state of the generator for dropout on the host; remove one of the two"
    elif any(True for _ in running_statistics(engine.module)):
        reason = "running statistics of a batch norm are put back after a skip, from memory that changes"
    elif engine.monitor.found is None:
        reason = "it needs the vote as Triton kernels; set optim.compile=true, AdamW(compile=True)"
    elif engine.explain_skips:
        reason = "explain_skips keeps the arguments of forwards, which a replay overwrites"
    if reason:
        raise ConfigError(f"engine.graph=true: {reason}, or set engine.graph=false")
