"""The range of gradients for which advice on precision was given, and departures from it during a run.

Advice rests on the gradients of a few steps. If training moves them out of the range seen then, by more than a margin,
the advice may no longer hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.errors import ConfigError
from dtrain.precision.histogram import Histogram

KEY = "envelope"
"""Key of the envelope in the JSON of ``dtrain probe``."""

LOW_TAIL = 0.01
"""Share of the nonzero elements that may lie below the low end of a range."""


@dataclass(frozen=True)
class GradientRange:
    """Range of one parameter's unscaled gradient, as exponents of 2.

    Attributes:
        low: largest e with at most ``LOW_TAIL`` of the nonzero elements below 2^e.
        top: largest e with an element of magnitude at least 2^e.
    """

    low: int
    top: int

    @staticmethod
    def of(histogram: Histogram) -> GradientRange | None:
        """Returns the range; None without any finite element other than zero and FP32's subnormals."""
        top = histogram.top_exponent
        if top is None:
            return None
        counts = histogram.by_exponent()
        below, allowed = 0, LOW_TAIL * sum(counts.values())
        for exponent, count in counts.items():
            below += count
            if below > allowed:
                return GradientRange(exponent, top)
        raise AssertionError("the last exponent exceeds any share below 1")


@dataclass(frozen=True)
class Departure:
    """A parameter whose gradient has left its range by more than the margin.

    Attributes:
        edge: ``top``: its largest elements are larger; ``low``: its smallest are smaller.
        value: exponent now.
        limit: exponent up to which, or down to which, the advice holds: that of the probe and the margin.
    """

    parameter: str
    edge: str
    value: int
    limit: int

    def __str__(self) -> str:
        if self.edge == "top":
            return (
                f"the largest gradient of '{self.parameter}' has reached 2^{self.value}; the probe's advice holds "
                f"below 2^{self.limit + 1}"
            )
        return (
            f"more than {LOW_TAIL:.0%} of the gradient of '{self.parameter}' is below 2^{self.value + 1}; the probe's "
            f"advice holds down to 2^{self.limit}"
        )


@dataclass(frozen=True)
class Envelope:
    """The ranges in which advice was given.

    Attributes:
        ranges: by parameter.
        margin: factor by which gradients may leave their range before it is a departure.
    """

    ranges: Mapping[str, GradientRange]
    margin: float = 8.0  # as that of a calibrated loss scale

    @staticmethod
    def of(histograms: Mapping[str, Histogram], margin: float = 8.0) -> Envelope:
        """Returns the envelope of unscaled gradients; a parameter whose gradient is all zero has no range."""
        found = {name: GradientRange.of(histogram) for name, histogram in histograms.items()}
        return Envelope({name: own for name, own in found.items() if own is not None}, margin)

    def departures(self, histograms: Mapping[str, Histogram]) -> list[Departure]:
        """Returns where the unscaled gradients leave the ranges; parameters without a range are not compared."""
        slack = math.floor(math.log2(self.margin))
        found = []
        for name, histogram in histograms.items():
            before, now = self.ranges.get(name), GradientRange.of(histogram)
            if before is None or now is None:
                continue
            if now.top > before.top + slack:
                found.append(Departure(name, "top", now.top, before.top + slack))
            if now.low < before.low - slack:
                found.append(Departure(name, "low", now.low, before.low - slack))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {"margin": self.margin, "ranges": {name: [own.low, own.top] for name, own in self.ranges.items()}}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Envelope:
        """Returns the envelope that ``to_dict`` describes."""
        ranges = {str(name): GradientRange(int(low), int(top)) for name, (low, top) in values["ranges"].items()}
        return Envelope(ranges, float(values["margin"]))

    @staticmethod
    def read(path: Path) -> Envelope:
        """Returns the envelope in the JSON of a probe.

        Raises:
            ConfigError: there is none.
        """
        try:
            return Envelope.from_dict(json.loads(path.read_text(encoding="utf-8"))[KEY])
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file; expected the JSON that `dtrain probe` writes") from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{path}: expected the JSON that `dtrain probe` writes, with a key '{KEY}'; got "
                f"{type(error).__name__}: {error}"
            ) from None
