"""The memory that a run needs on a rank, and the largest micro-batch that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dtrain.planning.devices import Device
from dtrain.planning.memory.heap import Heap
from dtrain.planning.memory.step_memory import Margin, StepMemory, margin, step_memory
from dtrain.planning.planned_run import PlannedRun, RecordedRun

SAVED_COPY = "saved_copy"
"""Kind of the copy of masters and states that an asynchronous save writes, in the memory of the host."""

MARGIN = "margin"
_OBJECTS = (1, 2)
"""Small objects of a tensor on malloc's heap, the least and the most: its storage, and what else holds it."""

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


def plan_memory(run: PlannedRun, num_steps: int = 2) -> MemoryPlan:
    """Returns the memory of ``run``, whose model and engine take ``num_steps`` steps on fake tensors.

    Raises:
        DtrainError: ``dtrain train`` would refuse the run.
    """
    return memory_of(run.record(num_steps=num_steps))


def memory_of(recorded: RecordedRun) -> MemoryPlan:
    """Returns the memory of a recorded run."""
    run = recorded.run
    heaps = [Heap(count) for count in _OBJECTS] if run.device.type == "cpu" else []
    step = step_memory(recorded.storages, recorded.steps, recorded.memory, heaps)
    return MemoryPlan(run.device, run.num_ranks, step, saved_copy(run, recorded.saved[0]), tuple(_notes(run)))


def _notes(run: PlannedRun) -> Iterator[str]:
    if run.compiles_blocks:
        yield "the run compiles blocks (model.compile); the plan counts the activations of uncompiled ones"
    if run.config.model.offload_activations and run.device.type == "cuda":
        yield "the plan counts the inputs of recomputed blocks on the device; model.offload_activations moves them away"


def saved_copy(run: PlannedRun, saved: int) -> int:
    """Returns the bytes of :data:`SAVED_COPY` while a step runs, of a rank that saves ``saved``."""
    config = run.config
    is_copied = config.checkpoint.asynchronous and 0 < config.train.save_every < config.train.steps
    return saved if run.device.type == "cpu" and is_copied else 0


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
    other = plan_memory(run.with_micro_batch_size(size), 2 if run.device.type == "cpu" else 1)
    tensors = plan.tensors + other.step.first - plan.step.first
    per_sample = (tensors + other._margin(tensors).high - plan.high) / (size - own)
    return max(0, int(own + (run.device.memory - plan.high) / max(per_sample, 1.0)))
