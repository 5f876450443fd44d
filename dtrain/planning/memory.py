"""Memory of one rank in a step, by kind: what the engine holds between steps, and what lives at the peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from dtrain.engine.interface import Engine
from dtrain.planning.devices import Device
from dtrain.planning.storages import StorageTracker

ACTIVATIONS, BACKWARD, UPDATE, UNSHARDED = "activations", "backward", "update", "unsharded"
"""Kinds beside those of ``engine.memory()``: allocated in forward, in backward, in the update, and full weights."""

PER_SAMPLE = (ACTIVATIONS, BACKWARD)
"""Kinds that grow with the micro-batch."""

NUM_STEPS = 2  # buffers that stay are allocated in the first
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


def run_steps(
    engine: Engine,
    batch: Mapping[str, Tensor],
    num_micro_batches: int,
    tracker: StorageTracker,
    num_steps: int = NUM_STEPS,
) -> StepMemory:
    """Runs steps of ``engine``, on real or on fake tensors, and returns the memory of the last one.

    Args:
        engine: built inside ``tracker``.
        batch: keyword arguments of the model.
        num_micro_batches: forwards and backwards of a step.
        tracker: entered.
        num_steps: the first one allocates the buffers that stay.
    """
    first = tracker.largest = 0
    for heap in tracker.heaps:
        heap.trim()  # as malloc does until engine.initialize, at its end, raises malloc's thresholds
    for _ in range(num_steps):
        _relabel_states(engine, tracker)
        tracker.reset_peak()
        for micro in engine.accumulate([batch] * num_micro_batches):
            with tracker.labelled(ACTIVATIONS):
                output = engine(**micro)
            with tracker.labelled(BACKWARD):
                engine.backward(output)
            del output
        with tracker.labelled(UPDATE):
            engine.step()
        first = first or sum(tracker.peak.values())
    peak = {kind: nbytes for kind, nbytes in tracker.peak.items() if nbytes}
    held = [max(0, heap.peak - sum(peak.values())) for heap in tracker.heaps] or [0]
    states, host = split_memory(engine)
    return StepMemory(states, peak, first, tracker.largest, (min(held), max(held)), host)


def split_memory(engine: Engine) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the bytes of ``engine.memory()`` on the rank's device, and those in the memory of the host beside it."""
    memory = engine.memory()
    host = {kind: memory.pop(kind) for kind in engine.host_kinds}
    return memory, host


def _relabel_states(engine: Engine, tracker: StorageTracker) -> None:
    for kind, tensors in engine.states.storages().items():
        held = [tensor for tensor in tensors if tensor.numel()]
        if kind in engine.host_kinds:
            tracker.exclude(tensor.untyped_storage() for tensor in held)
        else:
            tracker.relabel(kind, held)


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
