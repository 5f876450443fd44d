"""Sums that tell what a format has done to one product of one module, over its calls and the micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce
from operator import add
from typing import Any, Self

import torch
from torch import Tensor

from dtrain.measure.probe.records import ProductResult

RANGE_MARGIN = 4.0
"""Range is the cause if the format's error has at least this many times the energy (6 dB) that its mantissa alone
gives, with unlimited range."""

WORTH_NAMING_DB = 40.0
"""A result with a higher signal-to-noise ratio (an error below 1 %) has no cause named."""


class _Summed:
    """Records whose fields add up."""

    def __add__(self, other: Self) -> Self:
        names = [item.name for item in fields(self)]  # type: ignore[arg-type]
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in names))


def add_to(sums: dict[Any, Any], key: object, value: Any) -> None:
    """Adds ``value`` to the sum of that key, which may be the first."""
    sums[key] = sums[key] + value if key in sums else value


@dataclass(frozen=True)
class Operand(_Summed):
    """Counts of one operand's elements: nonzero ones, those that became zero, all, and those out of range."""

    nonzero: int = 0
    underflows: int = 0
    numel: int = 0
    saturated: int = 0


@dataclass(frozen=True)
class Measure(_Summed):
    """One product of one call, in one format.

    Attributes:
        signal: sum of the squares of the FP32 result.
        noise: sum of the squares of the format's error; infinite if the format made an element Inf or NaN.
        unlimited_noise: the same with the format's mantissa and unlimited range.
        change: predicted change of the loss, signed.
    """

    operands: Operand
    signal: float
    noise: float
    unlimited_noise: float
    change: float


def count(x: Tensor, quantized: Tensor) -> Operand:
    """Compares ``x`` with its rounded values; finite elements that became Inf are saturated."""
    counts = torch.stack(
        (x.count_nonzero(), quantized.count_nonzero(), quantized.isinf().sum(), x.isinf().sum())
    ).tolist()
    # a rounded zero is zero, and Inf stays Inf
    return Operand(counts[0], counts[0] - counts[1], x.numel(), counts[2] - counts[3])


def energies(exact: Tensor, computed: Tensor, gradient: Tensor | None = None) -> tuple[float, float, float]:
    """Returns the energy of ``exact``, that of the error of ``computed``, and <gradient, error>.

    The last two are infinite if ``computed`` has an element that is not finite although ``exact`` is.
    """
    error = computed - exact
    change = (gradient * error).sum(dtype=torch.float64) if gradient is not None else error.new_zeros(())
    signal, noise = (torch.linalg.vector_norm(t, dtype=torch.float64).square() for t in (exact, error))
    values = torch.stack((signal, noise, change.double())).tolist()
    if not math.isfinite(values[0]):  # FP32 itself overflows: nothing to compare with
        return math.nan, math.nan, math.nan
    return (values[0], values[1], values[2]) if math.isfinite(values[1]) else (values[0], math.inf, math.inf)


def result(module: str, product: str, format_name: str, measures: Sequence[Measure]) -> ProductResult:
    """Returns the result of ``measures``, one for each micro-batch."""
    total = reduce(add, measures)
    counted = total.operands
    return ProductResult(
        module,
        product,
        format_name,
        decibels(total.signal, total.noise),
        counted.underflows / counted.nonzero if counted.nonzero else 0.0,
        counted.saturated / counted.numel if counted.numel else 0.0,
        _cause(total),
        math.sqrt(sum(measure.change**2 for measure in measures) / len(measures)),
    )


def decibels(signal: float, noise: float) -> float:
    """Returns the signal-to-noise ratio; infinite without noise."""
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal and noise < math.inf else -math.inf


def _cause(total: Measure) -> str:
    if decibels(total.signal, total.noise) >= WORTH_NAMING_DB:
        return ""
    return "range" if total.noise >= RANGE_MARGIN * total.unlimited_noise else "precision"
