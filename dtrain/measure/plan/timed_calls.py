"""Recorded calls on real tensors with random values, and the time that they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dtrain.device import elapsed_ms
from dtrain.planning.calls import Signature, TensorSpec
from dtrain.planning.products import GROUPED

_INDEXED = {"embedding": 0, "embedding_dense_backward": 0, "nll_loss_forward": 0, "nll_loss_backward": 1}
"""Operations whose integers are indices, and the argument whose first or last dimension they index."""

_ROUNDS, _LEAST_ROUNDS = 15, 5
_LEAST_MS = 1.0  # shorter intervals measure the clock


def bind(signature: Signature, device: torch.device) -> Callable[[], Any]:
    """Returns a function that calls the operation on new tensors of ``device`` with random values."""
    high = _num_indices(signature)
    values = [
        tensor_of(value, device, high) if isinstance(value, TensorSpec) else device if _is_device(value) else value
        for value in signature.values
    ]
    if signature.name == GROUPED:
        values[2] = _equal_ends(signature, device)
    args, kwargs = pytree.tree_unflatten(values, signature.structure)
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


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type != "meta"


def _num_indices(signature: Signature) -> int:
    name, args = signature.name, signature.args
    if name not in _INDEXED:
        return 2 if name.startswith("bitwise") else 1
    if name == "embedding_dense_backward":
        return int(args[2])
    return int(args[_INDEXED[name]].shape[-1 if name.startswith("nll") else 0])


def median_ms(runs: Sequence[Callable[[], Any]], device: torch.device, deadline: float) -> list[float] | None:
    """Returns the median milliseconds of each, timed in turn, so that a change of the clock rate meets all.

    Args:
        deadline: of ``time.monotonic``; None is returned if it comes before five rounds are done.
    """
    for run in runs:
        run()
    calls = [max(1, round(_LEAST_MS / max(elapsed_ms(run, device, 1), 1e-3))) for run in runs]
    samples: list[list[float]] = [[] for _ in runs]
    for number in range(_ROUNDS):
        if time.monotonic() > deadline:
            if number < _LEAST_ROUNDS:
                return None
            break
        for run, count, taken in zip(runs, calls, samples, strict=True):
            taken.append(elapsed_ms(run, device, count))
    return [median(taken) for taken in samples]
