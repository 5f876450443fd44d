"""Which steps of a run are measured, and what is found against a probe's advice."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from dtrain.cli.resolve import compose
from dtrain.config.schema import TelemetryConfig
from dtrain.errors import ConfigError
from dtrain.precision.histogram import Histogram
from dtrain.telemetry.envelope import KEY, Envelope, GradientRange
from dtrain.telemetry.precision import PrecisionFindings
from dtrain.train.sampling import PrecisionSampling
from dtrain.train.setup import check_patterns
from tests.helpers.one_rank import build, loss_of, start, train_step


def sample(config: TelemetryConfig, num_steps: int, *, overflows: int = -1) -> list[PrecisionFindings]:
    engine, sink = start(loss_scale=16.0), Mock()
    sampling = PrecisionSampling(engine, config, [sink])
    for step in range(num_steps):
        with sampling.around_step():
            if step == overflows:
                engine.backward(loss_of(engine) * 1e38)
                engine.step()
            else:
                train_step(engine)
    return [call.args[0] for call in sink.precision.call_args_list]


@pytest.mark.parametrize(("every", "steps"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4]), (6, [])])
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


@pytest.mark.parametrize(
    ("names", "message"),
    [("0.weight 0.bias head.weight", ""), ("0.weight head.weight", "1 of its 2 parameters are not")],
)
def test_advice_of_another_model_is_refused(names: str, message: str, tmp_path: Path) -> None:
    path = advice(tmp_path, Envelope.of({n: Histogram.from_dict({"between": {"-3": 5}}) for n in names.split()}))
    config = replace(compose(["experiment=smoke", "precision=fp32"]), telemetry=TelemetryConfig(advice=path))
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_patterns(config, build())
