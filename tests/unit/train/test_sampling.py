"""Which steps of a run are measured, and what is found against a probe's advice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from dtrain.cli.resolve import compose
from dtrain.config.schema import TelemetryConfig
from dtrain.errors import ConfigError
from dtrain.precision.histogram import Histogram
from dtrain.telemetry.envelope import KEY, Envelope, GradientRange
from dtrain.telemetry.metrics import StepMetrics
from dtrain.telemetry.precision import PrecisionFindings
from dtrain.train.sampling import PrecisionSampling
from dtrain.train.setup import check_patterns
from tests.helpers.one_rank import build, loss_of, start, train_step


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.findings: list[PrecisionFindings] = []

    def step(self, metrics: StepMetrics) -> None: ...

    def validation(self, step: int, losses: Mapping[str, float]) -> None: ...

    def close(self, exit_code: int) -> None: ...

    def precision(self, findings: PrecisionFindings) -> None:
        self.findings.append(findings)


def sample(config: TelemetryConfig, num_steps: int, *, overflows: int = -1) -> list[PrecisionFindings]:
    engine, sink = start(loss_scale=16.0), Kept()
    sampling = PrecisionSampling(engine, config, [sink])
    for step in range(num_steps):
        with sampling.around_step():
            if step == overflows:
                engine.backward(loss_of(engine) * 1e38)
                engine.step()
            else:
                train_step(engine)
    return sink.findings


@pytest.mark.parametrize(("every", "steps"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4]), (5, [5]), (6, [])])
def test_every_nth_step_is_measured(every: int, steps: list[int]) -> None:
    assert [found.step for found in sample(TelemetryConfig(every), 5)] == steps


def advice(folder: Path, envelope: Envelope) -> str:
    path = folder / "probe.json"
    path.write_text(json.dumps({KEY: envelope.to_dict()}))
    return str(path)


def test_departures_from_advice_are_found_in_applied_steps(tmp_path: Path) -> None:
    (first,) = sample(TelemetryConfig(1), 1)
    probed = Envelope.of(first.report.unscaled())
    assert probed.ranges  # of gradients without the loss scale
    near = TelemetryConfig(1, advice=advice(tmp_path, probed))
    assert all(not found.departures for found in sample(near, 3))
    moved = GradientRange(probed.ranges["0.weight"].low, probed.ranges["0.weight"].top - 10)
    far = replace(probed, ranges={**probed.ranges, "0.weight": moved})
    found = sample(TelemetryConfig(1, advice=advice(tmp_path, far)), 3, overflows=1)
    assert [[departure.parameter for departure in own.departures] for own in found] == [["0.weight"], [], ["0.weight"]]
    assert found[0].departures[0].limit == moved.top + 3
    assert not found[1].report.applied


def test_advice_of_another_model_is_refused(tmp_path: Path) -> None:
    config = compose(["experiment=smoke", "precision=fp32"])
    model: nn.Module = build()
    cases = {("0.weight",): "", ("0.weight", "0.bias", "head.weight"): ""}
    cases |= {("head.weight",): "of another model", ("0.weight", "head.weight"): "1 of its 2 parameters are not in"}
    for names, message in cases.items():
        path = advice(tmp_path, Envelope.of({name: Histogram.from_dict({"between": {"-3": 5}}) for name in names}))
        advised = replace(config, telemetry=TelemetryConfig(advice=path))
        if not message:
            check_patterns(advised, model)
            continue
        with pytest.raises(ConfigError, match=message):
            check_patterns(advised, model)


def test_keys_without_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"activations=\['a'\] needs sampled steps"):
        TelemetryConfig(0, activations=["a"])
