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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dtrain.distributed.logging import logger
from dtrain.distributed.progress import Phase
from dtrain.distributed.schedule import Issued
from dtrain.engine.graphs.internals import Draw, StepInternals, on_host, refuse_missed
from dtrain.engine.outcome import StepOutcome
from dtrain.engine.parts.part import StepUnderWay, StepWork
from dtrain.engine.rng import generators_of, rng_key
from dtrain.engine.vote.decide import Decision
from dtrain.engine.vote.record import COLUMNS, pinned
from dtrain.errors import UsageError

new_pool: Callable[[], Any] = torch.cuda.graph_pool_handle
"""Makes a pool of memory. Graphs share it: no two run at once, and what the host refers to keeps its place."""

_new_graph: Callable[[], Any] = torch.cuda.CUDAGraph


class CapturedStep:
    """The graphs of one kind of step in a ``pool``, and the memory that the host writes before a replay."""

    def __init__(
        self, own: StepInternals, pool: Any, batch: list[Any], weights: Sequence[float], draws: Sequence[Draw]
    ) -> None:
        device = own.engine.device
        self._own, self._pool = own, pool
        self._votes, self._updates = _new_graph(), _new_graph()
        self._inputs = pytree.tree_map_only(Tensor, partial(_like, device), batch)
        are_one = all(weight == 1 for weight in weights)
        self._weights = [None if are_one else torch.empty((), device=device) for _ in weights]
        self._words = _Words(own.ballot.num_words(len(batch)), device)
        self._draws = {draw: generators_of(device)[-1].clone_state() for draw in draws}
        for generator in self._draws.values():
            self._votes.register_generator_state(generator)
        self._kept = own.losses.values()  # whose memory the engine replaces if a step has more micro-batches
        self._issued: list[Issued] = []  # collectives: of the micro-batches, of the vote, of the update
        self._received: set[int] = set()
        self._open: Any = None  # the graph that is captured now
        self._is_launched = False
        self._result: tuple[Decision, Tensor] | None = None

    def _fill(self, batch: list[Any], weights: Sequence[float]) -> None:
        """Copies what a step computes with into the memory of the graph."""
        engine = self._own.engine
        for target, given in zip(pytree.tree_leaves(self._inputs), pytree.tree_leaves(batch), strict=True):
            if isinstance(target, Tensor):
                target.copy_(on_host(given, target.device), non_blocking=True)
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
        own.engine.comm.schedule.progress.begin(Phase.FORWARD, own.run.attempted_steps)
        self._fill(batch, weights)
        own.parts.gradients.before_backward()
        own.losses.micro_batches[:] = range(len(batch))
        own.engine.monitor.received |= self._received
        own.parts.gradients.after_backward()
        self._is_launched = False
        try:
            with own.replaced(work=StepWork(lambda: None, self._replay_vote, self._replay_update)):
                return own.engine.step(**arguments)
        except BaseException:
            if not self._is_launched:  # then the step has not begun
                own.losses.clear()
                own.engine.monitor.received.clear()
            raise

    def _replay_vote(self, step: StepUnderWay) -> tuple[Decision, Tensor]:
        assert self._result is not None
        schedule = self._own.engine.comm.schedule
        schedule.repeat(self._issued[0])
        self._words.write(self._own.ballot.words(step))
        self._words.send()
        self._is_launched = True
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
            engine.comm.schedule.noted = None
            self._own.batch.backward_failed = True  # the device has run nothing of this step
            if self._open is not None:  # else each later operation on the stream would fail
                with suppress(RuntimeError):
                    self._open.capture_end()
            if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).partition("\n")[0]
            raise UsageError(
                f"engine.graph=true: the step cannot be captured ({reason}); it may not read a value of the device, "
                f"nor launch other work for other values; set engine.graph=false"
            ) from error
        logger.info("captured a step of %d micro-batches; later ones of its shapes are replayed", len(batch))
        return outcome

    def _begin(self, graph: Any) -> None:
        # threads of NCCL and of the loader may do meanwhile what a capture forbids
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._open = graph

    def _end(self, graph: Any) -> None:
        self._open = None
        graph.capture_end()

    def _note_collectives(self) -> None:
        self._issued.append(self._own.engine.comm.schedule.note())

    def _scale(self) -> Tensor:
        return self._words.place[COLUMNS["loss_scale"]].view(torch.float64).float()

    def _send(self, words: Sequence[int]) -> Tensor:
        self._note_collectives()
        return self._words.write(words)

    def _capture_vote(self, launched: StepWork, step: StepUnderWay) -> tuple[Decision, Tensor]:
        self._received = set(self._own.engine.monitor.received)
        refuse_missed(self._own.ballot.missed.names)
        self._result = launched.vote(step)
        self._end(self._votes)
        self._words.send()
        self._votes.replay()
        return self._result

    def _capture_update(self, launched: StepWork, step: StepUnderWay, decision: Decision) -> None:
        self._note_collectives()
        self._begin(self._updates)
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


def _like(device: torch.device, tensor: Tensor) -> Tensor:
    """Returns memory for a tensor like this one, whose strides an operation may depend on."""
    strides = torch.empty(tensor.size(), device="meta").stride() if 0 in tensor.stride() else tensor.stride()
    return torch.empty_strided(tensor.size(), strides, dtype=tensor.dtype, device=device)


class _Words:
    """Words that the host sends to a fixed ``place`` on the device, int64 [n]."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.place = torch.empty(num_words, dtype=torch.int64, device=device)
        self._values: Sequence[int] = ()

    def write(self, words: Sequence[int]) -> Tensor:
        """Keeps ``words`` for ``send``; returns their place."""
        self._values = words
        return self.place

    def send(self) -> None:
        self.place.copy_(pinned(self._values, self.place.device), non_blocking=True)
