"""Tables of the formats: properties, peak rates of GPUs, and how each format rounds a number."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import TypeAlias

from dtrain.precision.formats import FORMATS, LEAST_GRADIENT, FloatFormat
from dtrain.precision.hardware import GPU, GPUS, RATED
from dtrain.tools.tables import Table

_LARGEST_EXPONENT = 300  # power of ten: the errors are shown as FP64

Number: TypeAlias = Fraction | float
"""An exact number, or a float if it is Inf or NaN."""


def parse_number(text: str) -> Number | None:
    """Parses a number without rounding; None if ``text`` is no number or outside 1e-300 to 1e300."""
    try:
        decimal = Decimal(text)
    except InvalidOperation:
        return None
    if not decimal.is_finite():
        return float(decimal) if not decimal.is_snan() else None
    if decimal and abs(decimal.adjusted()) > _LARGEST_EXPONENT:
        return None
    return Fraction(decimal)


def number_table(text: str, number: Number) -> Table:
    columns = ("format", "becomes", "absolute error", "relative error", "what happened")
    return Table(text, columns, [_number_row(floats, number) for floats in FORMATS])


def _number_row(floats: FloatFormat, number: Number) -> tuple[str, ...]:
    rounded = floats.rounded(number)
    if not (math.isfinite(rounded.value) and math.isfinite(number)):
        return floats.name, f"{rounded.value:g}", "-", "-", rounded.event
    error = abs(Fraction(rounded.value) - Fraction(number))
    relative = f"{float(error / abs(Fraction(number))):.3g}" if number else "0"
    return floats.name, f"{rounded.value:.9g}", f"{float(error):.3g}", relative, rounded.event


NUMBER_NOTE = (
    "FP8: the result of a cast alone. Before a matmul dtrain divides each tensor or each row by a power of two, so "
    "that its largest element fits."
)


def format_tables() -> list[Table]:
    names = ("", *(floats.name for floats in FORMATS))
    rates = ("GPU", *RATED, "source")
    return [
        Table("Formats", names, [(title, *map(cell, FORMATS)) for title, cell in _PROPERTIES.items()]),
        Table("TFLOP/s of dense matrix products at the peak", rates, [_rates_row(gpu) for gpu in GPUS]),
    ]


def notes() -> list[str]:
    exponent = math.frexp(LEAST_GRADIENT)[1] - 1
    sources = {gpu.source: gpu.url for gpu in GPUS}
    return [
        f"Needs scaling: the smallest number is above 2^{exponent}, and gradients down to there mattered to a network "
        f"of Micikevicius et al., Mixed Precision Training (ICLR 2018), section 3.2. dtrain scales the loss for FP16, "
        f"and each tensor or each row for FP8.",
        "TF32 is a mode of FP32 matmuls, not a tensor dtype: only the operands are rounded, here to nearest; a Tensor "
        "Core that truncates has twice the error.",
        "Rates: published by NVIDIA, dense (half the sparse rate if only that is published), sums in FP32; fp32 "
        "without Tensor Cores. '-': the GPU has no such Tensor Cores; 'unknown': the documents disagree.",
        *(f"{source}: {url}" for source, url in sources.items()),
    ]


_PROPERTIES: dict[str, Callable[[FloatFormat], str]] = {
    "bits": lambda f: f"{f.bits}, stored in {f.stored_bits}" if f.stored_bits else f"{f.bits}",
    "sign + exponent + mantissa": lambda f: f"1 + {f.exponent_bits} + {f.mantissa_bits}",
    "largest": lambda f: _short(f.max),
    "smallest normal": lambda f: _short(f.min_normal),
    "smallest subnormal": lambda f: _short(f.min_subnormal),
    "epsilon: from 1 to the next": lambda f: _short(f.epsilon),
    "decimal digits": lambda f: f"{f.decimal_digits:.1f}",
    "finite numbers": lambda f: f"{f.num_finite:,}",
    "powers of two spanned": lambda f: f"{f.binades}",
    "overflow becomes": lambda f: "Inf" if f.ieee else _short(f.max),
    "a sum of ones stops at": lambda f: f"{f.ones_add_up_to:,}",
    "needs scaling": lambda f: "yes" if f.needs_scaling else "no",
}


def _short(value: float) -> str:
    return f"{value:,.0f}" if 1 <= value < 1e6 else f"{value:.5g}"


def _rates_row(gpu: GPU) -> tuple[str, ...]:
    rates = {name: "unknown" if teraflops is None else f"{teraflops:g}" for name, teraflops in gpu.rates.items()}
    return gpu.name, *(rates.get(name, "-") for name in RATED), gpu.source
