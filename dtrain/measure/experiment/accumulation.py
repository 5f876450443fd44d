"""Errors of dot products summed one by one in FP16, BF16 and FP32, against their bound, over the length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Generator, Tensor

from dtrain.precision.formats import BF16, FP16, FP32, FloatFormat, gamma
from dtrain.tools.format_styles import GREY, STYLES
from dtrain.tools.tables import Table

PAPER = "some networks need products of FP16 numbers accumulated in FP32 and converted to FP16 afterwards (section 3.3)"
SUMS = {FP16: torch.float16, BF16: torch.bfloat16, FP32: torch.float32}
"""Formats of the sums; the operands are BF16 for sums in BF16, else FP16."""
MATMUL = "fp16 matmul"
"""A product of FP16 matrices as a Linear computes it: FP32 sums, and a result rounded to FP16."""

_TABLE_LENGTHS = (64, 1024, 4096, 32768)


@dataclass(frozen=True)
class SumErrors:
    """Errors relative to the sum of the products' magnitudes, by length.

    Attributes:
        vectors: ``random signs``, ``positive`` or ``worst case``.
        sums: format of the partial sums, or :data:`MATMUL`.
        errors: largest of the trials, by length.
        bounds: of the error, by length; None where the bound does not hold for any number of roundings.
    """

    vectors: str
    sums: str
    errors: list[float]
    bounds: list[float | None]


@dataclass(frozen=True)
class AccumulationResult:
    seed: int
    trials: int
    lengths: list[int]
    cases: list[SumErrors]

    def of(self, vectors: str, sums: str) -> SumErrors:
        return next(case for case in self.cases if (case.vectors, case.sums) == (vectors, sums))

    def error(self, vectors: str, sums: str, length: int) -> float:
        return self.of(vectors, sums).errors[self.lengths.index(length)]


def random_signs(shape: tuple[int, int], floats: FloatFormat, generator: Generator) -> tuple[Tensor, Tensor]:
    x, y = positive(shape, floats, generator)
    return x * (2 * torch.randint(2, shape, generator=generator) - 1), y


def positive(shape: tuple[int, int], floats: FloatFormat, generator: Generator) -> tuple[Tensor, Tensor]:
    x, y = torch.rand(2, *shape, generator=generator) / 2 + 0.5
    return x, y


def worst_case(shape: tuple[int, int], floats: FloatFormat, generator: Generator) -> tuple[Tensor, Tensor]:
    """Returns vectors whose first product is 1 and the others half a unit in its last place: each of them is lost."""
    exponent = -(floats.mantissa_bits + 1)
    x, y = torch.full(shape, 2.0 ** (exponent // 2)), torch.full(shape, 2.0 ** (exponent - exponent // 2))
    x[:, 0] = y[:, 0] = 1.0
    return x, y


VECTORS: dict[str, tuple[Callable[[tuple[int, int], FloatFormat, Generator], tuple[Tensor, Tensor]], str]] = {
    "random signs": (random_signs, "errors cancel"),
    "positive": (positive, "errors add up"),
    "worst case": (worst_case, "1, then terms too small to count"),
}


def run(longest: int = 2**15, trials: int = 64, seed: int = 0) -> AccumulationResult:
    """Measures lengths from 2 to ``longest``, a power of two."""
    lengths = [2**power for power in range(1, longest.bit_length())]
    cases = []
    for name, (make, _) in VECTORS.items():
        for floats, dtype in SUMS.items():
            x, y = make((trials, longest), floats, Generator().manual_seed(seed))
            x, y = (v.to(torch.bfloat16 if floats is BF16 else torch.float16) for v in (x, y))
            errors = _errors(x, y, _running_sums(x.to(dtype), y.to(dtype), lengths), lengths)
            found = [gamma(n, floats.unit_roundoff) for n in lengths]
            bounds = [bound if bound < float("inf") else None for bound in found]
            cases.append(SumErrors(name, floats.name, errors, bounds))
            if floats is FP32:
                # one more rounding, of the result to FP16
                bounds = [(1 + bound) * (1 + FP16.unit_roundoff) - 1 for bound in found]
                products = [torch.bmm(x[:, None, :n], y[:, :n, None]).flatten() for n in lengths]
                cases.append(SumErrors(name, MATMUL, _errors(x, y, products, lengths), bounds))
    return AccumulationResult(seed, trials, lengths, cases)


def _running_sums(x: Tensor, y: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Returns the sums [trials] of the first n products for each n; each product and each sum is rounded."""
    total, found = torch.zeros_like(x[:, 0]), []
    wanted = set(lengths)
    for index, (a, b) in enumerate(zip(x.T.contiguous(), y.T.contiguous(), strict=True), start=1):
        total = total + a * b
        if index in wanted:
            found.append(total)
    return found


def _errors(x: Tensor, y: Tensor, sums: Sequence[Tensor], lengths: Sequence[int]) -> list[float]:
    products = x.double() * y.double()
    exact, magnitude = products.cumsum(dim=1), products.abs().cumsum(dim=1)
    relative = [
        (total.double() - exact[:, n - 1]).abs() / magnitude[:, n - 1] for total, n in zip(sums, lengths, strict=True)
    ]
    return [error.max().item() for error in relative]


def finding(result: AccumulationResult) -> str:
    length = 4096 if 4096 in result.lengths else result.lengths[-1]
    fp16, fp32 = (result.error("positive", floats.name, length) for floats in (FP16, FP32))
    return (
        f"Summed in FP16, a dot product of {length:,} positive terms is off by {fp16:.0%}; "
        f"summed in FP32 by {fp32:.0e}, and every error is within its bound"
    )


def tables(result: AccumulationResult) -> list[Table]:
    lengths = [length for length in _TABLE_LENGTHS if length in result.lengths]
    columns = ("vectors", "sums in", *(f"n = {length:,}: error (bound)" for length in lengths))
    rows = []
    for case in result.cases:
        cells = []
        for length in lengths:
            place = result.lengths.index(length)
            bound = case.bounds[place]
            cells.append(f"{case.errors[place]:.1e} ({'none' if bound is None else f'{bound:.1e}'})")
        rows.append((case.vectors, case.sums, *cells))
    title = f"Dot products of length n: largest error of {result.trials}, relative to the sum of the magnitudes"
    return [Table(title, columns, rows)]


def draw(figure: Figure, result: AccumulationResult) -> None:
    figure.set_size_inches(11, 4.9)
    panels = figure.subplots(1, len(VECTORS), sharey=True)
    for axes, (vectors, (_, meaning)) in zip(panels, VECTORS.items(), strict=True):
        _draw_case(axes, result, vectors)
        axes.set_title(f"{vectors}: {meaning}", fontsize=10.5)
    panels[0].set_ylabel("error / sum of the magnitudes,\nlargest of the trials")
    legend = panels[0].get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=5, fontsize=9, frameon=False)


def _draw_case(axes: Axes, result: AccumulationResult, vectors: str) -> None:
    for floats in SUMS:
        case, color = result.of(vectors, floats.name), STYLES[floats][0]
        axes.plot(
            result.lengths, _visible(case.errors), "-o", markersize=3, color=color, label=f"sums in {floats.name}"
        )
        bounds = [(n, bound) for n, bound in zip(result.lengths, case.bounds, strict=True) if bound is not None]
        axes.plot(*zip(*bounds, strict=True), "--", linewidth=1, color=color)
    case = result.of(vectors, MATMUL)
    axes.plot(result.lengths, _visible(case.errors), ":s", markersize=3, color=GREY, label="matmul of fp16 tensors")
    axes.plot([], [], "--", color="black", linewidth=1, label="bound n u / (1 - n u)")
    axes.set(yscale="log", xlabel="length n of the vectors", ylim=(1e-8, 3))
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)


def _visible(errors: Sequence[float]) -> list[float]:
    """Errors of 0 become NaN, which a logarithmic axis leaves out."""
    return [error or float("nan") for error in errors]
