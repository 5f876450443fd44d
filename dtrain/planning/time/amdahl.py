"""What faster products would bring: their share of a step, and their speed-up in other formats (Amdahl's law)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dtrain.device import synchronize
from dtrain.planning.record.products import ATTENTION, MATMUL, MatrixProduct, computes_product, products
from dtrain.planning.record.recorder import RecordedCall, StepRecorder, TensorSpec
from dtrain.planning.shapes.timed_calls import bind, has_products, median_ms, tensor_of
from dtrain.planning.time.measured import PlannedRank

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PROFILED_STEPS = 3
_FLOAT8_MULTIPLE = 16  # of N and K, which the FP8 product of torch requires


@dataclass(frozen=True)
class Item:
    """An operation of a step.

    Attributes:
        name: as PyTorch calls it.
        ms: of all its calls in a step.
        calls: in a step.
        is_product: whether it multiplies matrices.
        is_elementwise: whether ``torch.compile`` could fuse it with its neighbors.
    """

    name: str
    ms: float
    calls: int
    is_product: bool
    is_elementwise: bool


def limit(share: float) -> float:
    """Returns Amdahl's limit: the speed-up of a step if its products, ``share`` of it, took no time."""
    return 1 / max(1 - share, 1e-9)


def limit_line(share: float) -> str:
    return f"Amdahl's limit: {limit(share):.3g} times as fast if products took no time"


def expected(share: float, speedup: float) -> float:
    """Returns the speed-up of a step whose products, ``share`` of it, are ``speedup`` times as fast."""
    return 1 / (1 - share + share / speedup)


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
    with rank.batches() as batches:
        batch = next(batches)
    with StepRecorder(rank.engine.module) as recorder:
        rank.session.step(batch[:1])
    return recorder.calls


def speedups(calls: Sequence[RecordedCall], device: torch.device, budget_s: float) -> dict[str, float]:
    """Returns how many times as fast the products of ``calls`` are in other formats that ``device`` has in hardware.

    A format is left out if its products cannot be timed within ``budget_s`` seconds in all.
    """
    found = {product.signature: product for product in products(calls)}
    counts = Counter(call.signature for call in calls if call.signature in found)
    own = {product.format for product in found.values()}
    wanted = [name for name in (*_DTYPES, "fp8") if has_products(name, device) and {name} != own]
    result = {}
    for name in wanted:
        before = after = 0.0
        for signature, count in counts.items():
            product = found[signature]
            runs = [bind(signature, device), in_format(product, name, device)]
            share = product.flops / sum(other.flops for other in found.values())
            times = median_ms(runs, device, share * budget_s / len(wanted))
            if times is None:
                break
            before += count * times[0]
            after += count * times[1]
        else:
            if after:
                result[name] = before / after
    return result


def in_format(product: MatrixProduct, name: str, device: torch.device) -> Callable[[], Any]:
    """Returns a function that computes ``product`` of random values in a format.

    In FP8 it does so only where dtrain would: products of two matrices whose sizes are multiples of 16.
    """

    def matrix(rows: int, dtype: torch.dtype) -> Tensor:
        return tensor_of(TensorSpec((rows, product.k), (product.k, 1), dtype), device)

    is_linear = product.kind == MATMUL and product.batch == 1 and not product.is_grouped
    if name == "fp8":
        if not is_linear or product.n % _FLOAT8_MULTIPLE or product.k % _FLOAT8_MULTIPLE:
            return bind(product.signature, device)
        left, right = (matrix(rows, torch.float8_e4m3fn) for rows in (product.m, product.n))
        scale = torch.ones((), device=device)
        return partial(torch._scaled_mm, left, right.t(), scale, scale, out_dtype=torch.bfloat16)
    dtype = _DTYPES[name]
    if product.format == "fp8":
        return partial(torch.mm, matrix(product.m, dtype), matrix(product.n, dtype).t())
    signature, is_attention = product.signature, product.kind == ATTENTION

    def converted(value: Any) -> Any:
        is_operand = isinstance(value, TensorSpec) and value.dtype in _DTYPES.values()
        # attention keeps the sums of its rows, of three dimensions, in FP32
        return replace(value, dtype=dtype) if is_operand and (not is_attention or len(value.shape) == 4) else value

    return bind(signature.map(converted), device)
