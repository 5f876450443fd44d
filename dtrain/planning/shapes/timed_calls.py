"""Recorded calls on real tensors with random values, and the time that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dtrain.device import alternating_ms, elapsed_ms
from dtrain.planning.record.products import GROUPED
from dtrain.planning.record.recorder import Signature, TensorSpec
from dtrain.precision.hardware import has_bf16_products, has_float8_tensor_cores

_INDEXED = {"embedding": 0, "embedding_dense_backward": 0, "nll_loss_forward": 0, "nll_loss_backward": 1}
"""Operations whose integers are indices, and the argument whose first or last dimension they index."""

_ROUNDS, _LEAST_ROUNDS = 15, 5
_LEAST_MS = 1.0  # shorter intervals measure the clock


def bind(signature: Signature, device: torch.device) -> Callable[[], Any]:
    """Returns a function that calls the operation on new tensors of ``device`` with random values."""
    high = _num_indices(signature)

    def real(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type != "meta":
            return device
        return tensor_of(value, device, high) if isinstance(value, TensorSpec) else value

    on_device = signature.map(real)
    args, kwargs = list(on_device.args), dict(on_device.kwargs)
    if signature.name == GROUPED:
        args[2] = _equal_ends(signature, device)
    return lambda: signature.func(*args, **kwargs)


def _equal_ends(signature: Signature, device: torch.device) -> Tensor:
    """Returns where each expert's rows end if all have the same number."""
    left, right, ends = signature.args[:3]
    total = right.shape[-1] if len(left.shape) == 3 else left.shape[0] if len(right.shape) == 3 else left.shape[-1]
    (count,) = ends.shape
    return torch.tensor([total * (i + 1) // count for i in range(count)], dtype=ends.dtype, device=device)


def tensor_of(spec: TensorSpec, device: torch.device, high: int = 1) -> Tensor:
    """Returns a tensor of random values; integers are below ``high``."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    extent = extent if spec.numel else 0
    if (spec.dtype.is_floating_point and spec.dtype.itemsize > 1) or spec.dtype.is_complex:
        values = torch.randn(extent, dtype=spec.dtype, device=device)
    elif spec.dtype.is_floating_point:
        values = torch.randn(extent, device=device).to(spec.dtype)
    else:
        values = torch.randint(high, (extent,), device=device).to(spec.dtype)
    return values.as_strided(spec.shape, spec.stride)


def _num_indices(signature: Signature) -> int:
    name, args = signature.name, signature.args
    if name not in _INDEXED:
        return 2 if name.startswith("bitwise") else 1
    if name == "embedding_dense_backward":
        return int(args[2])
    return int(args[_INDEXED[name]].shape[-1 if name.startswith("nll") else 0])


def median_ms(runs: Sequence[Callable[[], Any]], device: torch.device, budget_s: float) -> list[float] | None:
    """Returns the median milliseconds of each, timed in turn; None if five rounds take longer than ``budget_s``."""
    for run in runs:
        run()
    first = [elapsed_ms(run, device) for run in runs]
    calls = max(1, round(_LEAST_MS / max(min(first), 1e-3)))
    rounds = min(_ROUNDS, int(1e3 * budget_s / max(calls * sum(first), 1e-3)))
    if rounds < _LEAST_ROUNDS:
        return None
    times = alternating_ms({str(number): run for number, run in enumerate(runs)}, device, rounds, calls=calls, warmup=0)
    return [median(taken) for taken in times.values()]


def has_products(name: str, device: torch.device) -> bool:
    """Whether ``device`` multiplies matrices of a format in hardware."""
    if name == "fp8":
        return has_float8_tensor_cores(device)
    if name == "bf16":
        return has_bf16_products(device)
    return name == "fp32" or device.type == "cuda"
