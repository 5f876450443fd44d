"""Memory of one rank in a step, by kind: what the engine holds between steps, and what lives at the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dtrain.planning.devices import Device
from dtrain.planning.memory.heap import Heap
from dtrain.planning.record.recorder import ACTIVATIONS, BACKWARD, RecordedStep, RecordedStorage

PER_SAMPLE = (ACTIVATIONS, BACKWARD)
"""Kinds that grow with the micro-batch."""

_MIB = 2**20


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one rank.

    Attributes:
        states: between steps, by the kinds of ``engine.memory()``.
        peak: at the moment of a step when most is live, by kind.
        first: at the peak of the first step, in which persistent buffers are allocated when they are first used.
        largest: of one storage of a step; a kernel may copy it, such as into another layout.
        fragments: that malloc's heap holds in addition at the peak, between two bounds; (0, 0) for a GPU.
        host: between steps in the memory of the host beside a GPU, by kind; in none of the above.
    """

    states: Mapping[str, int]
    peak: Mapping[str, int]
    first: int
    largest: int
    fragments: tuple[int, int]
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.peak.values())

    @property
    def growing(self) -> int:
        """Bytes at the peak that are in proportion to the micro-batch."""
        return sum(self.peak.get(kind, 0) for kind in PER_SAMPLE)


def step_memory(
    storages: Sequence[RecordedStorage],
    steps: Sequence[RecordedStep],
    memory: tuple[Mapping[str, int], Mapping[str, int]],
    heaps: Sequence[Heap] = (),
) -> StepMemory:
    """Returns the memory of the second of ``steps``, or of the only one.

    Args:
        storages: of engine and steps.
        steps: as recorded.
        memory: bytes of ``engine.memory()`` on the device, and in the memory of the host beside it.
        heaps: simulated ones, which take the same blocks.
    """
    first, last = steps[0], steps[:2][-1]
    events = [(begin, -1) for begin in dict.fromkeys((first.begin, last.begin))]
    for number, storage in enumerate(storages):
        if storage.kind:
            events += [(at, number) for at in (storage.born, storage.died) if at is not None and at <= last.end]
    live: Counter[str] = Counter()
    total = largest_total = first_peak = 0
    peak: Mapping[str, int] = {}
    for at, number in sorted(events):
        if number < 0:  # a step begins
            first_peak, largest_total, peak = largest_total, total, dict(live)
            if at == first.begin:
                for heap in heaps:
                    heap.trim()  # as malloc does until engine.initialize, at its end, raises malloc's thresholds
            continue
        storage = storages[number]
        is_born = at == storage.born
        live[str(storage.kind)] += storage.nbytes if is_born else -storage.nbytes
        total += storage.nbytes if is_born else -storage.nbytes
        for heap in heaps:
            if is_born:
                heap.allocate(number, storage.nbytes)
            else:
                heap.release(number)
        if total > largest_total:
            largest_total, peak = total, dict(live)
    return StepMemory(
        states=memory[0],
        peak={kind: nbytes for kind, nbytes in peak.items() if nbytes},
        first=first_peak if len(steps) > 1 else largest_total,
        largest=max((s.nbytes for s in storages if first.begin < s.born < last.end), default=0),
        fragments=_held(heaps, largest_total),
        host=memory[1],
    )


def _held(heaps: Sequence[Heap], nbytes: int) -> tuple[int, int]:
    held = [max(0, heap.peak - nbytes) for heap in heaps] or [0]
    return min(held), max(held)


@dataclass(frozen=True)
class Margin:
    """Memory that no tensor accounts for, in bytes.

    Attributes:
        low, high: bounds.
        reasons: what it is.
    """

    low: int
    high: int
    reasons: tuple[str, ...]


def margin(device: Device, num_ranks: int, tensors: int, largest: int, fragments: tuple[int, int]) -> Margin:
    """Returns the band for allocator, kernels and communication beside ``tensors`` bytes.

    On a CPU it is measured (docs/planning.md): ``fragments`` of malloc's heap are simulated, and may be a tenth less;
    kernels take up to two copies of the ``largest`` storage and 64 MiB, and libraries that the first step loads up to
    256 MiB. On a GPU it is not: the driver's context and the modules of kernels take 400 to 818 MiB, cuBLAS a workspace
    of 32 MiB (Hopper), NCCL's channels 100 MiB to 1.1 GiB, and the allocator's rounding and fragments up to a twelfth
    of the tensors.
    """
    if device.type == "cpu":
        low, high = fragments
        kernels = 2 * largest + (64 + 256) * _MIB
        return Margin(int(0.9 * low), high + kernels, ("fragments of the heap", "scratch of kernels", "libraries"))
    low, high = 400 * _MIB, 850 * _MIB + tensors // 12
    if num_ranks > 1:
        low, high = low + 100 * _MIB, high + 1024 * _MIB
    reasons = ("the driver's context", "kernels", "fragments", *(("NCCL",) if num_ranks > 1 else ()))
    return Margin(low, high, reasons)
