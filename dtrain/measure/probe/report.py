"""Result of ``dtrain probe``, and its JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from pathlib import Path

from dtrain.measure.probe.evidence import Evidence
from dtrain.measure.probe.records import Advice, Analysis, Trial
from dtrain.measure.record import RecordHead, write_record
from dtrain.precision.formats import FP16
from dtrain.precision.histogram import Histogram, share
from dtrain.telemetry.envelope import KEY, Envelope

VERSION = 1
"""Version of the JSON file, for its readers."""


@dataclass(frozen=True)
class NoiseRun:
    """An FP32 training that measures noise: ``change`` says how it differs from the reference."""

    change: str
    losses: list[float]


@dataclass(frozen=True, kw_only=True)
class ProbeReport(RecordHead, Evidence):
    """Result of one run of ``dtrain probe``.

    Attributes:
        num_parameters: trained parameters.
        batch: what a step consists of, in words.
        noise_runs: the trainings behind ``noise``.
        retrained: trials that the search for the advice added.
        left_out: formats that this machine cannot try, with the reason.
        seconds: time of each stage.
    """

    num_parameters: int
    batch: str
    noise_runs: list[NoiseRun]
    retrained: list[Trial]
    advice: Advice
    left_out: dict[str, str]
    seconds: dict[str, float]


@dataclass(frozen=True)
class ConstantScale:
    """The constant loss scale of FP16 that the histogram of all gradients supports.

    Attributes:
        scale: a power of two.
        margin: factor at least by which gradients can grow before they overflow at that scale.
        top_exponent: the largest gradient is below 2^(top_exponent + 1).
        flushed_unscaled: share of the nonzero gradients that FP16 flushes to zero without a scale.
        flushed: the same share at ``scale``.
    """

    scale: float
    margin: float
    top_exponent: int
    flushed_unscaled: float
    flushed: float

    @staticmethod
    def of(analysis: Analysis) -> ConstantScale | None:
        """Returns the scale of ``analysis`` with its evidence; None if FP16 was not examined."""
        total = all_gradients(analysis)
        if analysis.loss_scale is None or total is None or total.top_exponent is None:
            return None
        scale, top = analysis.loss_scale, total.top_exponent
        return ConstantScale(
            scale,
            FP16.max / (scale * math.ldexp(1.0, top + 1)),
            top,
            share(total.flushed(FP16), total.num_nonzero),
            share(total.flushed(FP16, scale), total.num_nonzero),
        )

    def __str__(self) -> str:
        return (
            f"FP16: constant loss scale {self.scale:g}. The largest gradient, of the first and the last step, is below "
            f"2^{self.top_exponent + 1}, so that gradients can grow {self.margin:.3g} times before they overflow. FP16 "
            f"flushes {self.flushed_unscaled:.2%} of the gradients to zero without a scale, {self.flushed:.2%} at this "
            f"one"
        )


def all_gradients(analysis: Analysis) -> Histogram | None:
    """Returns the histogram of the gradients of all weights and of all products' outputs; None if there are none."""
    histograms = [*analysis.gradients.values(), *analysis.activation_gradients.values()]
    return reduce(add, histograms) if histograms else None


def write_report(path: Path, report: ProbeReport) -> None:
    """Writes ``report`` atomically as JSON, with histograms by exponent and the envelope of the gradients."""
    analysis = report.analysis
    histograms = {
        name: {key: histogram.to_dict() for key, histogram in getattr(analysis, name).items()}
        for name in ("gradients", "activation_gradients")
    }
    scale = ConstantScale.of(analysis)
    more = {
        "version": VERSION,
        "unit": report.unit,
        "analysis": {**asdict(analysis), **histograms},
        "constant_loss_scale": None if scale is None else asdict(scale),
        KEY: Envelope.of(analysis.gradients).to_dict(),
    }
    write_record(path, report, **more)
