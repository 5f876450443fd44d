"""The memory that a run needs on a rank, and the largest micro-batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from dtrain.engine.interface import Engine
from dtrain.planning.devices import Device
from dtrain.planning.heap import Heap
from dtrain.planning.memory import ACTIVATIONS, BACKWARD, UNSHARDED, UPDATE, Margin, StepMemory, margin, split_memory
from dtrain.planning.storages import StorageTracker
from dtrain.train.planned import PlannedRun
from dtrain.train.session import MicroBatch, StepWatch

SAVED_COPY = "saved_copy"
"""Kind of the copy of masters and states that an asynchronous save writes, in the memory of the host."""

MARGIN = "margin"
_OBJECTS = (1, 2)
"""Small objects of a tensor on malloc's heap, the least and the most: its storage, and what else holds it."""

NUM_STEPS = 2  # buffers that stay are allocated in the first
_TOO_SMALL = 2**13  # bytes; not shown
FITS = "fits"


@dataclass(frozen=True)
class Row:
    """Bytes of one kind at the peak, between two bounds."""

    kind: str
    low: int
    high: int


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one rank at the peak of a step.

    Attributes:
        device: whose memory it is.
        num_ranks: ranks that share the states.
        step: memory of the tensors.
        saved_copy: bytes of :data:`SAVED_COPY`, if the rank's device is a CPU.
        notes: what the plan takes otherwise than the run, a sentence each.
    """

    device: Device
    num_ranks: int
    step: StepMemory
    saved_copy: int
    notes: tuple[str, ...] = ()

    @property
    def tensors(self) -> int:
        return self.step.total + self.saved_copy

    @property
    def margin(self) -> Margin:
        """Memory that is in no tensor."""
        return self._margin(self.tensors)

    def _margin(self, tensors: int) -> Margin:
        low, high = (tensors * nbytes // self.step.total for nbytes in self.step.fragments)
        return margin(self.device, self.num_ranks, tensors, self.step.largest, (low, high))

    @property
    def rows(self) -> list[Row]:
        """The kinds in the order of ``engine.memory()``, then those of the step; without empty ones."""
        peak = {**dict.fromkeys(self.step.states, 0), **self.step.peak, SAVED_COPY: self.saved_copy}
        found = [Row(kind, nbytes, nbytes) for kind, nbytes in peak.items() if nbytes > _TOO_SMALL]
        return [*found, Row(MARGIN, self.margin.low, self.margin.high)]

    @property
    def low(self) -> int:
        return self.tensors + self.margin.low

    @property
    def high(self) -> int:
        return self.tensors + self.margin.high

    def can_hold(self, tensors: float) -> bool:
        """Whether the device holds this many bytes of tensors, with the upper bound of the margin."""
        return tensors + self._margin(int(tensors)).high <= self.device.memory

    @property
    def fit(self) -> str:
        """``fits``, ``may fit`` (the lower bound does) or ``does not fit``."""
        if self.high <= self.device.memory:
            return FITS
        return "may fit" if self.low <= self.device.memory else "does not fit"


@dataclass(frozen=True)
class _Labels(StepWatch):
    """Labels what the parts of a step allocate."""

    tracker: StorageTracker

    def forward(self, micro: MicroBatch) -> AbstractContextManager[None]:
        return self.tracker.labelled(ACTIVATIONS)

    def backward(self, micro: MicroBatch, output: Any, weight: float) -> AbstractContextManager[None]:
        return self.tracker.labelled(BACKWARD)

    def update(self) -> AbstractContextManager[None]:
        return self.tracker.labelled(UPDATE)


def run_steps(
    engine: Engine, step: Callable[[StepWatch], object], tracker: StorageTracker, num_steps: int = NUM_STEPS
) -> StepMemory:
    """Runs steps of ``engine``, on real or on fake tensors, and returns the memory of the last one.

    The engine is built inside ``tracker``, which is entered. The first step allocates the buffers that stay.
    """
    first = tracker.largest = 0
    for heap in tracker.heaps:
        heap.trim()  # as malloc does until engine.initialize, at its end, raises malloc's thresholds
    for _ in range(num_steps):
        _relabel_states(engine, tracker)
        tracker.reset_peak()
        step(_Labels(tracker))
        first = first or sum(tracker.peak.values())
    peak = {kind: nbytes for kind, nbytes in tracker.peak.items() if nbytes}
    held = [max(0, heap.peak - sum(peak.values())) for heap in tracker.heaps] or [0]
    states, host = split_memory(engine)
    return StepMemory(states, peak, first, tracker.largest, (min(held), max(held)), host)


def _relabel_states(engine: Engine, tracker: StorageTracker) -> None:
    for kind, tensors in engine.states.storages().items():
        held = [tensor for tensor in tensors if tensor.numel()]
        if kind in engine.host_kinds:
            tracker.exclude(tensor.untyped_storage() for tensor in held)
        else:
            tracker.relabel(kind, held)


def plan_memory(run: PlannedRun, num_steps: int = NUM_STEPS) -> MemoryPlan:
    """Returns the memory of ``run``, whose model and engine take ``num_steps`` steps on fake tensors.

    Raises:
        DtrainError: ``dtrain train`` would refuse the run.
    """
    tracker = StorageTracker([Heap(count) for count in _OBJECTS] if run.device.type == "cpu" else ())

    with tracker, run.engine(lambda output: tracker.relabel(UNSHARDED, [output])) as (engine, step):
        memory = run_steps(engine, partial(step, run.num_micro_batches), tracker, num_steps)
        return MemoryPlan(run.device, run.num_ranks, memory, saved_copy(run, engine), tuple(_notes(run)))


def _notes(run: PlannedRun) -> Iterator[str]:
    if run.compiles_blocks:
        yield "the run compiles blocks (model.compile); the plan counts the activations of uncompiled ones"
    if run.config.model.offload_activations and run.device.type == "cuda":
        yield "the plan counts the inputs of recomputed blocks on the device; model.offload_activations moves them away"


def saved_copy(run: PlannedRun, engine: Engine) -> int:
    """Returns the bytes of :data:`SAVED_COPY` while a step runs."""
    config = run.config
    is_copied = config.checkpoint.asynchronous and 0 < config.train.save_every < config.train.steps
    if run.device.type != "cpu" or not is_copied:
        return 0
    return sum(shard.nbytes for kind in engine.states.saved_dtypes for shard in engine.states.owned_shards(kind))


def largest_micro_batch(run: PlannedRun, plan: MemoryPlan) -> int:
    """Returns the largest micro-batch whose upper bound fits; 0: none does.

    Memory grows about linearly with the micro-batch. The growth is taken from the plan; then it is corrected by a plan
    of the micro-batch that was found.
    """
    own = run.config.train.micro_batch_size
    size, high = 0, 2**20  # `size` fits, or nothing does
    while high - size > 1:
        middle = (size + high) // 2
        fits = plan.can_hold(plan.tensors + plan.step.growing / own * (middle - own))
        size, high = (middle, high) if fits else (size, middle)
    if size in (0, own):
        return size
    # one step shows how the tensors grow, but not all fragments
    other = plan_memory(run.with_micro_batch_size(size), NUM_STEPS if run.device.type == "cpu" else 1)
    tensors = plan.tensors + other.step.first - plan.step.first
    per_sample = (tensors + other._margin(tensors).high - plan.high) / (size - own)
    return max(0, int(own + (run.device.memory - plan.high) / max(per_sample, 1.0)))
