"""The memory that a run needs on a rank at the peak of a step, by kind, and the largest micro-batch that fits."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dtrain.planning.devices import Device
from dtrain.planning.memory.heap import Heap
from dtrain.planning.planned_run import PlannedRun, RecordedSteps
from dtrain.planning.record.recorder import ACTIVATIONS, BACKWARD, RecordedStep, RecordedStorage
from dtrain.telemetry.texts import bytes_text

PER_SAMPLE = (ACTIVATIONS, BACKWARD)
"""Kinds that grow with the micro-batch."""

SAVED_COPY = "saved_copy"
"""Kind of the copy of masters and states that an asynchronous save writes, in the memory of the host."""

MARGIN, TOTAL = "margin", "total"
FITS = "fits"
_OBJECTS = (1, 2)
"""Small objects of a tensor on malloc's heap, the least and the most: its storage, and what else holds it."""

_TOO_SMALL = 2**13  # bytes; not shown
_MIB = 2**20


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank, of ``num_ranks`` that share the states, on a device.

    Attributes:
        states: between steps, by the kinds of ``engine.memory()``.
        host: between steps in the memory of the host beside a GPU, by kind; in none of the others.
        peak: at the moment of a step when most is live, by kind.
        first: at the peak of the first step, in which persistent buffers are allocated when they are first used.
        largest: of one storage of a step; a kernel may copy it, such as into another layout.
        fragments: that malloc's heap holds in addition to a byte of tensors, between two bounds; (0, 0) for a GPU.
        notes: what is on the host, and what the plan takes otherwise than the run, a sentence each.
    """

    device: Device
    num_ranks: int
    states: Mapping[str, int]
    host: Mapping[str, int]
    peak: Mapping[str, int]
    first: int
    largest: int
    fragments: tuple[float, float]
    notes: tuple[str, ...]

    @property
    def tensors(self) -> int:
        return sum(self.peak.values())

    @property
    def growing(self) -> int:
        """Bytes at the peak that are in proportion to the micro-batch."""
        return sum(self.peak.get(kind, 0) for kind in PER_SAMPLE)

    def bounds(self, tensors: float) -> tuple[int, int]:
        """Returns the least and the most that a rank takes: ``tensors`` bytes, allocator, kernels and communication.

        On a CPU they are measured (docs/scale/planning.md): ``fragments`` of malloc's heap are simulated, and may be a
        tenth less; kernels take up to two copies of the ``largest`` storage and 64 MiB, and libraries of the first step
        up to 256 MiB. On a GPU they are not: the driver's context and the modules of kernels take 400 to 818 MiB,
        cuBLAS a workspace of 32 MiB (Hopper), NCCL's channels 100 MiB to 1.1 GiB, and the allocator's rounding and
        fragments up to a twelfth of the tensors.
        """
        tensors = int(tensors)
        if self.device.type == "cpu":
            low, high = (round(tensors * part) for part in self.fragments)
            return tensors + int(0.9 * low), tensors + high + 2 * self.largest + (64 + 256) * _MIB
        low, high = 400 * _MIB, 850 * _MIB + tensors // 12
        if self.num_ranks > 1:
            low, high = low + 100 * _MIB, high + 1024 * _MIB
        return tensors + low, tensors + high

    @property
    def low(self) -> int:
        return self.bounds(self.tensors)[0]

    @property
    def high(self) -> int:
        return self.bounds(self.tensors)[1]

    @property
    def rows(self) -> dict[str, tuple[int, int]]:
        """Bounds by kind, without small ones: those of ``engine.memory()``, of the step, the margin and the total."""
        peak = {**dict.fromkeys(self.states, 0), **self.peak}
        found = {kind: (nbytes, nbytes) for kind, nbytes in peak.items() if nbytes > _TOO_SMALL}
        return {**found, MARGIN: (self.low - self.tensors, self.high - self.tensors), TOTAL: (self.low, self.high)}

    def can_hold(self, tensors: float) -> bool:
        """Whether the device surely holds this many bytes of tensors."""
        return self.bounds(tensors)[1] <= self.device.memory

    @property
    def fit(self) -> str:
        """``fits``, ``may fit`` (the lower bound does) or ``does not fit``."""
        if self.high <= self.device.memory:
            return FITS
        return "may fit" if self.low <= self.device.memory else "does not fit"


def plan_memory(run: PlannedRun, num_steps: int = 2) -> MemoryPlan:
    """Returns the memory of ``run``, of which ``num_steps`` steps are recorded; raises as ``PlannedRun.record``."""
    return memory_of(run.record(num_steps=num_steps))


def memory_of(recorded: RecordedSteps) -> MemoryPlan:
    """Returns the memory of the second step of a recorded run, or of the only one."""
    run, steps = recorded.run, recorded.steps[:2]
    states, host = recorded.memory
    heaps = [Heap(count) for count in _OBJECTS] if run.device.type == "cpu" else []
    peaks = peaks_of(recorded.storages, steps, heaps)
    tensors = sum(peaks[-1].values())
    fragments = [max(0, heap.peak - tensors) / tensors for heap in heaps] or [0.0]
    born_in_steps = (one.nbytes for one in recorded.storages if steps[0].begin < one.born < steps[-1].end)
    return MemoryPlan(
        device=run.device,
        num_ranks=run.num_ranks,
        states=states,
        host=host,
        peak={**peaks[-1], SAVED_COPY: saved_copy(run, recorded.saved[0])},
        first=sum(peaks[0].values()),
        largest=max(born_in_steps, default=0),
        fragments=(min(fragments), max(fragments)),
        notes=tuple(_notes(run, host)),
    )


def peaks_of(
    storages: Sequence[RecordedStorage], steps: Sequence[RecordedStep], heaps: Sequence[Heap] = ()
) -> list[dict[str, int]]:
    """Returns bytes by kind at the peak of each step; ``heaps`` take the same blocks, of engine and steps."""
    counted = [(number, one) for number, one in enumerate(storages) if one.kind and one.nbytes]
    events = [(one.born, number, one.nbytes) for number, one in counted]
    events += [(one.died, number, -one.nbytes) for number, one in counted if one.died is not None]
    live: Counter[str] = Counter()
    total = highest = 0
    peaks: list[dict[str, int]] = []
    for at, number, nbytes in sorted([*events, *((step.begin, -1, 0) for step in steps)]):
        if number < 0:  # a step begins
            for heap in heaps if not peaks else ():
                heap.trim()  # as malloc does until engine.initialize, at its end, raises malloc's thresholds
            highest = total
            peaks.append(dict(live))
        elif at <= steps[-1].end:
            live[str(storages[number].kind)] += nbytes
            total += nbytes
            for heap in heaps:
                if nbytes > 0:
                    heap.allocate(number, nbytes)
                else:
                    heap.release(number)
            if peaks and total > highest:
                highest, peaks[-1] = total, dict(live)
    return [{kind: nbytes for kind, nbytes in peak.items() if nbytes} for peak in peaks]


def _notes(run: PlannedRun, host: Mapping[str, int]) -> Iterator[str]:
    if host:
        kinds = ", ".join(f"{kind} {bytes_text(nbytes)}" for kind, nbytes in host.items())
        yield f"in the memory of the host, for each rank: {bytes_text(sum(host.values()))} ({kinds})"
    if run.compiles_blocks:
        yield "the run compiles blocks (model.compile); the plan counts the activations of uncompiled ones"
    if run.config.model.offload_activations and run.device.type == "cuda":
        yield "the plan counts the inputs of recomputed blocks on the device; model.offload_activations moves them away"


def saved_copy(run: PlannedRun, saved: int) -> int:
    """Returns the bytes of ``SAVED_COPY`` while a step runs, of a rank that saves ``saved``."""
    config = run.config
    is_copied = config.checkpoint.asynchronous and 0 < config.train.save_every < config.train.steps
    return saved if run.device.type == "cpu" and is_copied else 0


def largest_micro_batch(run: PlannedRun, plan: MemoryPlan) -> int:
    """Returns the largest micro-batch whose upper bound fits; 0: none does.

    Memory grows about linearly with the micro-batch. The growth is taken from the plan; then it is corrected by a plan
    of the micro-batch that was found.
    """
    own = run.config.train.micro_batch_size
    each = plan.growing / own
    # of the sizes from 1 as many fit as the largest one is
    size = bisect(range(1, 2**20), 0, key=lambda size: not plan.can_hold(plan.tensors + each * (size - own)))
    if size in (0, own):
        return size
    # one step shows how the tensors grow, but not all fragments
    other = plan_memory(run.with_micro_batch_size(size), 2 if run.device.type == "cpu" else 1)
    per_sample = (other.bounds(plan.tensors + other.first - plan.first)[1] - plan.high) / (size - own)
    return max(0, int(own + (run.device.memory - plan.high) / max(per_sample, 1.0)))
