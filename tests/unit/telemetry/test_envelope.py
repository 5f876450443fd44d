from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dtrain.errors import ConfigError
from dtrain.precision.histogram import Histogram
from dtrain.telemetry.envelope import KEY, Departure, Envelope, GradientRange


def powers(*exponents: int) -> Histogram:
    return Histogram.of(torch.tensor([2.0**exponent for exponent in exponents]))


def test_range_leaves_out_the_lowest_hundredth_and_zeros() -> None:
    values = torch.cat((torch.full((990,), 2.0**-10), torch.full((10,), 2.0**-30), torch.zeros(500), -torch.ones(1)))
    assert GradientRange.of(Histogram.of(values)) == GradientRange(low=-10, top=0)
    one_more = torch.cat((values, torch.full((2,), 2.0**-30)))
    assert GradientRange.of(Histogram.of(one_more)) == GradientRange(low=-30, top=0)
    assert GradientRange.of(Histogram.of(torch.zeros(3))) is None


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (powers(-20, -5), []),
        (powers(-23, -2), []),  # the margin of 8 on both sides
        (powers(-20, -1), [Departure("w", "top", -1, -2)]),
        (powers(-24, -5), [Departure("w", "low", -24, -23)]),
        (powers(-30, 4), [Departure("w", "top", 4, -2), Departure("w", "low", -30, -23)]),
        (Histogram.of(torch.zeros(4)), []),
    ],
)
def test_departure_is_beyond_the_margin(now: Histogram, expected: list[Departure]) -> None:
    envelope = Envelope.of({"w": powers(-20, -5), "never": Histogram.of(torch.zeros(2))})
    assert list(envelope.ranges) == ["w"]
    assert envelope.departures({"w": now, "never": powers(3), "unknown": powers(3)}) == expected


def test_departure_names_parameter_value_and_range() -> None:
    assert str(Departure("w", "low", -24, -23)) == (
        "more than 1% of the gradient of 'w' is below 2^-23; the probe's advice holds down to 2^-23"
    )


def test_envelope_is_read_from_a_probe(tmp_path: Path) -> None:
    envelope, path = Envelope.of({"w": powers(-20, -5)}, margin=4.0), tmp_path / "probe.json"
    path.write_text(json.dumps({KEY: envelope.to_dict()}))
    assert Envelope.read(path) == envelope
    for text in ("{}", "[]", "no JSON", json.dumps({KEY: {"margin": 8.0, "ranges": {"w": 3}}}), None):
        path.unlink() if text is None else path.write_text(text)
        with pytest.raises(ConfigError, match="dtrain probe"):
            Envelope.read(path)
