from __future__ import annotations

import glob
import json
import logging
import math
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtrain.cli.resolve import compose
from dtrain.errors import ConfigError
from dtrain.precision import report
from dtrain.precision.float8.cast import E4M3, E5M2, scale_of
from dtrain.precision.formats import FP8_E4M3, FP8_E5M2
from dtrain.precision.histogram import Histogram
from dtrain.precision.report import Float8ProductPrecision, OperandPrecision, ParameterPrecision, PrecisionReport
from dtrain.telemetry.console import Console
from dtrain.telemetry.envelope import KEY, Departure, Envelope, GradientRange
from dtrain.telemetry.metrics import METRICS_FILE, MetricsFile, read_metrics
from dtrain.telemetry.precision import PrecisionFindings
from dtrain.telemetry.precision_files import PrecisionFiles, read_sample, sample_files


def parameter(name: str, exponents: list[int], format: str = "fp16", *, better: float = 1.0) -> ParameterPrecision:
    histogram = Histogram.of(torch.tensor([2.0**exponent for exponent in exponents] + [0.0]))
    largest = 2.0 ** max(exponents)
    shares, update = report.GradientShares.of(histogram, largest, better), report.UpdateShares(3, 0.01, 0.5, 0.25)
    return ParameterPrecision(name, len(exponents) + 1, format, largest, histogram, shares, update)


def product(module: str, underflow: float, sqnr_db: float | None = 20.0) -> Float8ProductPrecision:
    gradient = OperandPrecision("gradient", "e5m2", sqnr_db, underflow, 0.0)
    return Float8ProductPrecision.of(module, "dgrad", (gradient, OperandPrecision("weight", "e4m3", None, 0.0, 0.0)))


def findings(*parameters: ParameterPrecision, better: float | None = None, step: int = 3) -> PrecisionFindings:
    return PrecisionFindings(PrecisionReport(step, True, 1.0, better, parameters))


@pytest.mark.parametrize("amax", [0.0, 1.0, 1.75, 1.76, 448.0, 449.0, 3e-5, 1e-38, 3e38])
def test_own_scale_is_the_reciprocal_of_the_casts_scale(amax: float) -> None:
    for dtype, floats in ((E4M3, FP8_E4M3), (E5M2, FP8_E5M2)):
        assert report.own_scale(torch.tensor(amax).item(), floats) == 1 / float(scale_of(torch.tensor(amax), dtype))
    assert report.own_scale(math.inf, FP8_E4M3) == report.own_scale(math.nan, FP8_E4M3) == 1.0


def test_power_below() -> None:
    assert [report.power_below(number) for number in (1.0, 0.99, 1000.0, 2.0**-20)] == [1.0, 0.5, 512.0, 2.0**-20]


def test_noises_of_operands_add_up() -> None:
    equal = tuple(OperandPrecision(name, "e4m3", 30.0, 0.0, 0.0) for name in ("input", "weight"))
    assert Float8ProductPrecision.of("m", "fprop", equal).sqnr_db == pytest.approx(30 - 10 * math.log10(2))
    exact = replace(equal[0], sqnr_db=None)
    assert Float8ProductPrecision.of("m", "fprop", (exact, exact)).sqnr_db is None


def test_metrics_have_the_worst_parameters(tmp_path: Path) -> None:
    many = [parameter(f"p{number}", [-30] * number + [0] * (12 - number)) for number in range(12)]
    found = findings(*many, better=4.0)
    float8 = product("a", 0.0, 25.0), product("b", 0.1, 9.0), product("c", 0.0, None)
    file = MetricsFile(tmp_path, 0)
    file.precision(replace(found, report=replace(found.report, float8=float8)))
    (line,) = read_metrics(tmp_path / METRICS_FILE)
    file.close(0)
    sampled = line["precision"]
    assert (line["step"], sampled["loss_scale"], sampled["better_scale"], sampled["departures"]) == (3, 1.0, 4.0, 0)
    assert [own["parameter"] for own in sampled["worst"]] == [f"p{number}" for number in range(11, 1, -1)]
    assert sampled["worst"][0]["flushed_fp16"] == pytest.approx(11 / 12)
    assert sampled["worst"][0]["update_lost_bf16"] == 0.5
    assert [own["module"] for own in sampled["worst_float8"]] == ["b", "a", "c"]
    assert sampled["worst_float8"][0]["underflow_gradient"] == 0.1
    scalars = found.scalars()
    assert scalars["loss_scale"] == 1.0
    assert scalars["flushed_fp16/p11"] == pytest.approx(11 / 12)
    assert "flushed_fp16/p0" not in scalars


def test_files_after_the_resumed_step_are_removed(tmp_path: Path) -> None:
    files = PrecisionFiles(tmp_path, 0)
    overflown = replace(parameter("p", [-30, 0]), largest=None)
    sampled = {
        step: PrecisionFindings(findings(overflown, step=step).report, (Departure("p", "top", 3, 1),))
        for step in (5, 10, 15)
    }
    for own in sampled.values():
        files.precision(own)
    (notes := tmp_path / "precision" / "step-notes.json").write_text("{}")
    assert list(sample_files(tmp_path)) == [5, 10, 15]
    assert read_sample(sample_files(tmp_path)[10]) == sampled[10]
    text = sample_files(tmp_path)[5].read_text()
    assert json.loads(text)["parameters"]["p"]["largest"] is None
    assert "NaN" not in text
    PrecisionFiles(tmp_path, 10)
    assert list(sample_files(tmp_path)) == [5, 10]
    assert notes.exists()
    keys = dict.fromkeys(("step", "applied", "loss_scale", "better_scale"), 1)  # those of a sample, with other values
    for other in ("{}", json.dumps({**keys, "departures": [], "parameters": []})):
        notes.write_text(other)
        with pytest.raises(ConfigError, match="a sampled step of a run"):
            read_sample(notes)


ROOM = parameter("blocks.0.up.weight", [-20] * 5 + [-3] * 95)
CALIBRATED = (
    "the largest gradients leave room for a scale of 8192, which precision.loss_scale.mode=calibrated would choose"
)
FULL = "no larger scale fits the largest gradients: use precision=bf16"
BELOW = "5.0% of the nonzero gradient of '{}' is below FP16's normal range at loss scale 1, and 1.0% of it is zero; {}"


def fp8(*products: Float8ProductPrecision) -> PrecisionFindings:
    return PrecisionFindings(PrecisionReport(3, True, 1.0, None, (), products))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (findings(), None),
        (findings(parameter("p", [-20] * 1 + [-3] * 99), better=8.0), None),  # 1 % are not more than 1 %
        (findings(replace(ROOM, format="bf16"), better=8.0), None),
        (findings(ROOM, better=8192.0), BELOW.format(ROOM.name, CALIBRATED)),
        (findings(ROOM, better=1.0), BELOW.format(ROOM.name, FULL + ", or 'precision.rules={\"blocks.0.up\": fp32}'")),
        # a parameter of the model itself is in no module
        (findings(replace(ROOM, name="scale"), better=1.0), BELOW.format("scale", FULL)),
        (fp8(product("a", 0.05)), None),
        (
            fp8(product("a", 0.01), product("b", 0.06)),
            "FP8 flushes 6.0% of the gradient of 'b' to zero in dgrad; to keep the module out of FP8: "
            "'precision.rules={\"b\": bf16}'",
        ),
    ],
)
def test_console_speaks_of_the_formats_of_the_run(found: PrecisionFindings, message: str | None) -> None:
    advice = found.advice()
    assert (None if advice is None else advice[1]) == message


def test_rules_in_advice_are_accepted() -> None:
    modules, written = ("blocks.0", "experts[0]", "a b", "x:y", "0"), []
    for module in modules:
        advice = fp8(product(module, 0.06)).advice()
        assert advice is not None
        (override,) = shlex.split(advice[1].partition("out of FP8: ")[2])
        written.append(override.removeprefix("precision.rules={").removesuffix("}"))
    rules = compose(["precision=fp8", f"precision.rules={{{', '.join(written)}}}"]).precision.rules
    assert rules == dict.fromkeys(map(glob.escape, modules), "bf16")


def test_console_says_it_once_and_each_departure(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    console = Console(10, 0, tmp_path)
    departed = PrecisionFindings(findings(ROOM).report, (Departure("p", "top", 3, 1), Departure("q", "low", -9, -8)))
    with caplog.at_level(logging.WARNING):
        console.precision(findings(ROOM))
        console.precision(findings(ROOM, step=4))
        console.precision(departed)
    sampled, departure = caplog.messages
    assert sampled.startswith("step 3: 5.0% of the nonzero gradient of 'blocks.0.up.weight' is below FP16's")
    assert departure == (
        "step 3: the largest gradient of 'p' has reached 2^3; the probe's advice holds below 2^2 (and 1 more, in "
        "precision/step-3.json); run dtrain probe with more steps"
    )


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
    text = "more than 1% of the gradient of 'w' is below 2^-23; the probe's advice holds down to 2^-23"
    assert str(Departure("w", "low", -24, -23)) == text


def test_envelope_is_read_from_a_probe(tmp_path: Path) -> None:
    envelope, path = Envelope.of({"w": powers(-20, -5)}, margin=4.0), tmp_path / "probe.json"
    path.write_text(json.dumps({KEY: envelope.to_dict()}))
    assert Envelope.read(path) == envelope
    for text in ("{}", "[]", "no JSON", json.dumps({KEY: {"margin": 8.0, "ranges": {"w": 3}}}), None):
        path.unlink() if text is None else path.write_text(text)
        with pytest.raises(ConfigError, match="dtrain probe"):
            Envelope.read(path)
