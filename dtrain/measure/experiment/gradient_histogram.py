"""Exponents of activation gradients over a training in FP32, and what FP16 makes of them at each loss scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from torch import Tensor, nn

from dtrain.engine.interface import Engine
from dtrain.engine.measurement.hooks import on_outputs
from dtrain.measure.experiment.networks import SmallNetwork, convnet, detector, language_model
from dtrain.measure.experiment.train import train
from dtrain.precision.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FloatFormat
from dtrain.precision.histogram import NUM_BINS, Histogram, count_magnitudes, share
from dtrain.tools.format_styles import GREY, STYLES
from dtrain.tools.tables import Table

PAPER = (
    "of Multibox SSD's activation gradients 66.8 % were 0 and FP16 flushed another 31 %; a scale of 8 sufficed, 32K "
    "recovered all but 0.1 % (section 3.2; NVIDIA, Train With Mixed Precision)"
)
SCALES = tuple(2.0**power for power in range(16))
"""From 1 to 32,768."""

_TABLE_SCALES = (1.0, 8.0, 128.0, 1024.0, 32768.0)
_LINES = (("-o", STYLES[FP16][0]), (":s", "black"), ("--^", GREY))
_RANGE = range(-52, 18)  # powers of two drawn
FLUSHED = FP16.min_exponent - FP16.mantissa_bits - 1
"""FP16 rounds numbers up to two to this power to zero."""


@dataclass(frozen=True)
class NetworkGradients:
    """Gradients of the outputs of all convolutions and Linears, over all steps.

    Attributes:
        histogram: counts of the unscaled gradients by power of two (``Histogram.to_dict``).
    """

    network: str
    histogram: Mapping[str, int | Mapping[str, int]]

    def counted(self) -> Histogram:
        return Histogram.from_dict(self.histogram)

    def flushed(self, scale: float = 1.0) -> float:
        """Share of the nonzero gradients, times ``scale``, that FP16 flushes to zero."""
        counted = self.counted()
        return share(counted.flushed(FP16, scale), counted.num_nonzero)


@dataclass(frozen=True)
class GradientHistogramResult:
    steps: int
    seed: int
    networks: list[NetworkGradients]


def run(networks: Sequence[SmallNetwork] | None = None, steps: int = 300, seed: int = 0) -> GradientHistogramResult:
    networks = networks or (detector(), language_model(), convnet())
    return GradientHistogramResult(steps, seed, [_measure(network, steps, seed) for network in networks])


def _measure(network: SmallNetwork, steps: int, seed: int) -> NetworkGradients:
    counts = torch.zeros(NUM_BINS, dtype=torch.int64)

    def count(name: str, gradient: Tensor) -> None:
        counts.add_(count_magnitudes(gradient).cpu())

    def hook(engine: Engine) -> None:
        modules = engine.module.named_modules()
        on_outputs({name: module for name, module in modules if isinstance(module, (nn.Conv2d, nn.Linear))}, count)

    train(network, "fp32", steps, seed=seed, on_start=hook)
    return NetworkGradients(network.name, Histogram(tuple(counts.tolist())).to_dict())


def finding(result: GradientHistogramResult) -> str:
    first, largest = result.networks[0], SCALES[-1]
    return (
        f"{first.network}: FP16 flushes {first.flushed():.1%} of the nonzero activation gradients; "
        f"a loss scale of {largest:,.0f} leaves {first.flushed(largest):.1%}"
    )


def tables(result: GradientHistogramResult) -> list[Table]:
    columns = ("network", "zero in FP32", *(f"flushed, scale {scale:,.0f}" for scale in _TABLE_SCALES))
    rows = []
    for network in result.networks:
        counted = network.counted()
        zeros = share(counted.zeros, counted.total)
        rows.append((network.network, f"{zeros:.1%}", *(f"{network.flushed(scale):.2%}" for scale in _TABLE_SCALES)))
    title = f"Activation gradients over {result.steps} steps in FP32; flushed: share of the nonzero ones in FP16"
    return [Table(title, columns, rows)]


def draw(figure: Figure, result: GradientHistogramResult) -> None:
    """Draws the first network's histogram over the formats' ranges, and the recovery of all networks."""
    figure.set_size_inches(9, 8.8)
    histogram, ranges, recovery = figure.subplots(3, 1, height_ratios=(4, 1.5, 3.4))
    _draw_histogram(histogram, result.networks[0])
    _draw_ranges(ranges)
    ranges.set_xlim(histogram.get_xlim())
    for network, (style, color) in zip(result.networks, _LINES, strict=False):
        values = [network.flushed(scale) for scale in SCALES]
        recovery.plot(SCALES, values, style, color=color, markersize=4, label=network.network)
    recovery.set_xscale("log", base=2)
    recovery.axvspan(8, 32768, color=GREY, alpha=0.12, label="scales used in practice: 8 to 32K")
    recovery.set(xlabel="loss scale", ylabel="nonzero gradients that\nFP16 flushes to zero", xticks=SCALES[::3])
    recovery.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    recovery.yaxis.set_major_formatter(StrMethodFormatter("{x:.0%}"))
    recovery.grid(alpha=0.3)
    recovery.legend(fontsize=9)


def _draw_histogram(axes: Axes, network: NetworkGradients) -> None:
    counted, scale = network.counted(), SCALES[-1]
    shift = math.log2(scale)
    shares = {exponent: share(count, counted.total) for exponent, count in counted.by_exponent().items()}
    low, high, top = _RANGE[0], _RANGE[-1], 1.45 * max(shares.values())
    color = STYLES[FP16][0]
    axes.axvspan(low, FLUSHED, color=GREY, alpha=0.25)
    axes.axvspan(FLUSHED, FP16.min_exponent, color=color, alpha=0.12)
    axes.axvspan(FP16.min_exponent, FP16.max_exponent + 1, color=color, alpha=0.25)
    for start, text in ((FLUSHED - 13, "FP16: zero"), (FLUSHED + 1, "subnormal"), (FP16.min_exponent + 1, "normal")):
        axes.text(start, 0.93 * top, text, fontsize=10)
    places = [exponent + 0.5 for exponent in shares]
    axes.bar(places, list(shares.values()), 0.9, color="black", label="as they are")
    shifted = [place + shift for place in places]
    axes.bar(shifted, list(shares.values()), 0.9, color=color, label=f"times {scale:,.0f}")
    zeros = share(counted.zeros, counted.total)
    axes.text(low + 0.5, 0.78 * top, f"not shown: {zeros:.0%} are zero in FP32 too", fontsize=9)
    axes.set(ylabel="share of all activation gradients", xlim=(low, high), ylim=(0, top))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.0%}"))
    axes.legend(fontsize=9, loc="center right")


def _draw_ranges(axes: Axes) -> None:
    formats: tuple[FloatFormat, ...] = (FP8_E4M3, FP8_E5M2, FP16, BF16)
    for row, floats in enumerate(formats):
        color, *_ = STYLES[floats]
        smallest, normal = floats.min_exponent - floats.mantissa_bits, floats.min_exponent
        axes.barh(row, normal - smallest, left=smallest, height=0.7, color=color, alpha=0.4)
        axes.barh(row, floats.max_exponent + 1 - normal, left=normal, height=0.7, color=color)
    axes.set_yticks(range(len(formats)), [floats.name for floats in formats])
    axes.set(xlabel="magnitude of the gradient, as a power of two", ylabel="range\n(pale: subnormal)")
