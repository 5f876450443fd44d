"""What faster products would bring: their share of a step, and their speed-up in other formats (Amdahl's law)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from dtrain.device import synchronize
from dtrain.planning.record.products import computes_product, products
from dtrain.planning.record.recorder import RecordedCall, StepRecorder
from dtrain.planning.shapes.variants import DTYPES, has_products, in_format, timed_ratio
from dtrain.planning.time.measured import PlannedRank

_PROFILED_STEPS = 3


@dataclass(frozen=True)
class Item:
    """An operation of a step, its calls and the milliseconds of all; compiling fuses elementwise ones."""

    name: str
    ms: float
    calls: int
    is_product: bool
    is_elementwise: bool


def expected(share: float, speedup: float = math.inf) -> float:
    """Returns the speed-up of a step whose products, ``share`` of it, are so many times as fast, or take no time."""
    return 1 / max(1 - share + share / speedup, 1e-9)


def limit_line(share: float) -> str:
    return f"Amdahl's limit: {expected(share):.3g} times as fast if products took no time"


def profile_items(rank: PlannedRank) -> list[Item]:
    """Returns the operations of a step by their own time, longest first: kernels on a GPU, else the host's."""
    is_gpu = rank.engine.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    with rank.batches() as batches:
        prepared = [next(batches) for _ in range(_PROFILED_STEPS)]
    with profile(activities=activities) as profiler:
        for batch in prepared:
            rank.session.step(batch)
        synchronize(rank.engine.device)
    items = []
    for event in profiler.key_averages():
        us = event.self_device_time_total if is_gpu else event.self_cpu_time_total
        name = event.key.removeprefix("aten::")
        if us and (is_gpu or event.key != name):  # on a CPU the rest are records, such as of autograd
            ms, calls = us / 1e3 / _PROFILED_STEPS, event.count // _PROFILED_STEPS
            items.append(Item(name, ms, calls, computes_product(name), _is_elementwise(name)))
    return sorted(items, key=lambda item: -item.ms)


def _is_elementwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def record(rank: PlannedRank) -> list[RecordedCall]:
    """Returns the calls of a micro-batch and the update."""
    with rank.batches() as batches, StepRecorder(rank.engine.module) as recorder:
        rank.session.step(next(batches)[:1])
    return recorder.calls


def speedups(calls: Sequence[RecordedCall], device: torch.device, budget_s: float) -> dict[str, float]:
    """Returns how many times as fast the products of ``calls`` are in other formats that ``device`` has in hardware.

    A format is left out if its products cannot be timed within ``budget_s`` seconds in all.
    """
    found = {product.call.signature: product for product in products(calls)}
    counts = Counter(call.signature for call in calls if call.signature in found)
    own = {product.format for product in found.values()}
    wanted = [name for name in (*DTYPES, "fp8") if has_products(name, device) and {name} != own]
    result = {}
    for name in wanted:
        pairs = {(signature, in_format(found[signature], name)): count for signature, count in counts.items()}
        ratio = timed_ratio(pairs, device, budget_s / len(wanted))
        if ratio is not None:
            result[name] = 1 / ratio
    return result
