"""Curves as SVG, thinned so that no extreme is lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias
from xml.sax.saxutils import escape

import numpy as np

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 14, 34
_COLUMNS = WIDTH - _LEFT - _RIGHT
COLORS = ("#2f6fde", "#d9622b", "#2a9d6f", "#8e5bd0", "#c23b6b", "#7a7f1d", "#1f93a8", "#8a5a3c")
"""By the number of the run."""


Numbers: TypeAlias = "Sequence[float] | np.ndarray[Any, np.dtype[np.float64]]"


@dataclass(frozen=True)
class Curve:
    """One line of a chart.

    Attributes:
        label: in the legend.
        color: an index into ``COLORS``.
        steps, values: of equal length.
        low, high: bounds of a band at ``steps``; empty: none.
        is_dashed: whether the line is.
    """

    label: str
    color: int
    steps: Numbers
    values: Numbers
    low: Numbers = ()
    high: Numbers = ()
    is_dashed: bool = False


def thin(steps: Numbers, values: Numbers, low: float, high: float, columns: int) -> list[tuple[float, float]]:
    """Returns the points of a curve that a chart of ``columns`` pixels between ``low`` and ``high`` can show.

    Of each column the first, the least, the largest and the last remain, in their order.
    """
    at, numbers = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if len(at) > 2 * columns:
        column = np.minimum(((at - low) * (columns / ((high - low) or 1.0))).astype(np.int64), columns - 1)
        starts = [0, *(np.flatnonzero(np.diff(column)) + 1).tolist(), len(at)]
        kept: list[int] = []
        for start, stop in pairwise(starts):
            part = numbers[start:stop]
            kept += sorted({start, start + int(part.argmin()), start + int(part.argmax()), stop - 1})
        at, numbers = at[kept], numbers[kept]
    return list(zip(at.tolist(), numbers.tolist(), strict=True))


def chart(title: str, curves: Sequence[Curve], *, log: bool = False, marks: Sequence[float] = ()) -> str:
    """Returns an SVG of ``curves`` over steps, with vertical ``marks`` at skipped steps; empty without points.

    Args:
        log: whether the values are drawn on a logarithmic axis; those that are not positive are left out.
    """
    if log:
        curves = [_positive(curve) for curve in curves]
    curves = [curve for curve in curves if len(curve.steps)]
    if not curves:
        return ""
    left, right = float(min(np.min(c.steps) for c in curves)), float(max(np.max(c.steps) for c in curves))
    if left == right:
        left, right = left - 1, right + 1
    drawn = [np.asarray(v) for curve in curves for v in (curve.values, curve.low, curve.high) if len(v)]
    bottom, top = _range(float(min(map(np.min, drawn))), float(max(map(np.max, drawn))), log=log)
    base = HEIGHT - _BOTTOM

    def x(step: float) -> float:
        return _LEFT + _COLUMNS * (step - left) / (right - left)

    def y(value: float) -> float:
        scaled = math.log10(value) if log else value
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - (scaled - bottom) / (top - bottom))

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">']
    for tick in _log_ticks(bottom, top) if log else _ticks(bottom, top):
        at = _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - (tick - bottom) / (top - bottom))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        text = number(10**tick if log else tick)
        parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    for tick in _ticks(left, right, whole=True):
        parts.append(
            f'<text class="tick" x="{x(tick):.1f}" y="{HEIGHT - 14}" text-anchor="middle">{number(tick)}</text>'
        )
    parts.append(
        f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{HEIGHT - _BOTTOM}" y2="{HEIGHT - _BOTTOM}"/>'
    )
    for step in _thin_marks(marks, left, right):
        line = f'<line class="skip" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{_TOP}" y2="{base}">'
        parts.append(f"{line}<title>step {number(step)} skipped</title></line>")
    for curve in curves:
        parts += _draw(curve, x, y, left, right)
    return "".join([*parts, "</svg>"])


def _draw(
    curve: Curve, x: Callable[[float], float], y: Callable[[float], float], left: float, right: float
) -> list[str]:
    color = COLORS[curve.color % len(COLORS)]
    parts = []
    if len(curve.low):
        upper = [f"{x(s):.1f},{y(v):.1f}" for s, v in thin(curve.steps, curve.high, left, right, _COLUMNS)]
        lower = [f"{x(s):.1f},{y(v):.1f}" for s, v in thin(curve.steps, curve.low, left, right, _COLUMNS)]
        parts.append(f'<polygon fill="{color}" opacity="0.18" points="{" ".join(upper + lower[::-1])}"/>')
    points = thin(curve.steps, curve.values, left, right, _COLUMNS)
    title = f"<title>{escape(curve.label)}: {number(points[-1][1])} at step {number(points[-1][0])}</title>"
    if len(points) == 1:
        return [
            *parts,
            f'<circle cx="{x(points[0][0]):.1f}" cy="{y(points[0][1]):.1f}" r="3" fill="{color}">{title}</circle>',
        ]
    path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
    dash = ' stroke-dasharray="5 4"' if curve.is_dashed else ""
    return [*parts, f'<polyline class="curve" stroke="{color}"{dash} points="{path}">{title}</polyline>']


def _positive(curve: Curve) -> Curve:
    steps, values = np.asarray(curve.steps), np.asarray(curve.values)
    kept = values > 0
    return replace(curve, steps=steps[kept], values=values[kept], low=(), high=())


def _range(low: float, high: float, *, log: bool) -> tuple[float, float]:
    if log:
        low, high = math.log10(low), math.log10(high)
    room = 0.06 * (high - low) or max(abs(high), 1e-3) * 0.1
    return low - room, high + room


def _thin_marks(marks: Sequence[float], left: float, right: float) -> list[float]:
    columns = {round(_COLUMNS * (step - left) / (right - left)): step for step in marks if left <= step <= right}
    return list(columns.values())


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Returns about five round numbers between ``low`` and ``high``."""
    raw = (high - low) / 5
    unit = 10 ** math.floor(math.log10(raw))
    size = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    if whole:
        size = max(1.0, round(size))
    first = math.ceil(low / size)
    return [index * size for index in range(first, math.floor(high / size) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Returns logarithms of round numbers, for logarithms between ``low`` and ``high``."""
    if high - low > 2:
        return _ticks(low, high, whole=True)
    if high - low < 1:
        return [math.log10(tick) for tick in _ticks(10**low, 10**high)]
    powers = range(math.floor(low), math.ceil(high))
    return [at for power in powers for factor in (1, 2, 5) if low <= (at := power + math.log10(factor)) <= high]


def number(value: float) -> str:
    """Formats a number with four digits: ``12.5k``, ``0.0031``, ``1e-05``."""
    if value == 0:
        return "0"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"
