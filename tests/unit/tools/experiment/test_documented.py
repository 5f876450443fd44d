"""Every figure in docs/experiments.md is that of the stored results, and the claims hold on them."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from dtrain.config.dump import from_plain
from dtrain.precision.formats import FP16
from dtrain.tools.experiment import accumulation, formats, gradient_histogram, loss_scaling, master_weights
from dtrain.tools.experiment.cli import EXPERIMENTS, load
from dtrain.tools.experiment.records import read_record
from dtrain.tools.experiment.tasks import TASKS

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "experiments.md").read_text(encoding="utf-8")


def stored(name: str) -> Any:
    record = read_record(DOCS / "results" / "experiments" / f"experiment-{name}.json")
    assert record.experiment == name
    return from_plain(load(name).result, record.result)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_page_has_command_picture_table_and_figures(name: str) -> None:
    assert f"```bash\ndtrain experiment {name}\n```" in PAGE
    assert f"](pictures/experiment-{name}.png)" in PAGE
    assert (DOCS / "pictures" / f"experiment-{name}.png").is_file()
    for table in load(name).tables(stored(name)):
        assert table.markdown() in PAGE


def test_page_has_the_list_of_the_command() -> None:
    for name, question in EXPERIMENTS.items():
        assert re.search(rf"^  {name} +{re.escape(question)}$", PAGE, re.MULTILINE)


def test_master_weights() -> None:
    result: master_weights.MasterWeightsResult = stored("master-weights")
    assert len(result.rates("regression")) == len(result.rates("language model")) == 4

    def progress(network: str, precision: str, lr: float) -> float:
        return fmean(item.lost_progress for item in result.of(network, precision, lr))

    for network in ("regression", "language model"):
        assert progress(network, "fp16", 1e-6) > 0.85
        assert progress(network, "bf16", 1e-6) > 0.98
        assert progress(network, "bf16", 1e-5) > 0.8
        assert progress(network, "bf16", 1e-4) > 0.2
        assert abs(progress(network, "fp16", 1e-3)) < 0.01
    assert progress("regression", "fp16", 1e-5) > 0.6
    assert -0.1 < progress("regression", "fp16", 1e-4) < 0  # ahead
    found = result.of("regression", "bf16", 1e-3)
    assert len(found) == 3
    assert fmean(item.without.final for item in found) > 2 * fmean(item.with_masters.final for item in found)


def test_gradient_histogram() -> None:
    result: gradient_histogram.GradientHistogramResult = stored("gradient-histogram")
    detector, language, convnet = result.networks
    counted = detector.counted()
    assert 0.6 < counted.zeros / counted.total < 0.7
    assert detector.flushed() > 0.999
    assert detector.flushed(128.0) > 0.99
    assert 0.65 < detector.flushed(1024.0) < 0.7
    assert detector.flushed(32768.0) < 0.05
    assert counted.overflowing(FP16, 32768.0) == 0
    assert round(language.flushed(), 2) == 0.07
    assert round(convnet.flushed(), 3) == 0.002


def test_loss_scaling() -> None:
    result: loss_scaling.LossScalingResult = stored("loss-scaling")
    for seed in range(3):
        assert result.of("fp16", "none")[seed].curve.final > 0.85
    assert result.final("fp16", "8") > 5 * result.fp32
    assert result.final("fp16", "128") > 2 * result.fp32
    assert result.final("fp16", "1024") < 1.15 * result.fp32
    for scale in ("32768", "dynamic"):
        assert result.final("fp16", scale) == pytest.approx(result.fp32, rel=0.06)
    assert result.final("fp16", "dynamic") == pytest.approx(result.fp32, rel=0.05)


def test_accumulation() -> None:
    result: accumulation.AccumulationResult = stored("accumulation")
    for case in result.cases:
        for error, bound in zip(case.errors, case.bounds, strict=True):
            assert bound is None or error <= bound
    errors = {name: result.error("positive", name, 4096) for name in ("fp16", "bf16", "fp32")}
    assert errors == pytest.approx({"fp16": 0.12, "bf16": 0.89, "fp32": 2.5e-6}, rel=0.05)
    assert result.error("random signs", "fp16", 4096) < 5e-4


def test_formats() -> None:
    result: formats.FormatsResult = stored("formats")
    assert len(result.seeds) == 4
    assert [(item.task, item.metric, item.steps) for item in result.tasks] == [
        (task.name, task.metric, task.validation_steps) for task in TASKS
    ]
    for item in result.tasks:
        for precision in formats.PRECISIONS:
            if (item.task, precision) == ("regression, exact targets", "fp8"):
                assert min(item.gaps(precision)) > formats.DETECTION_LIMIT
                assert max(map(abs, item.mean_gaps(precision)[:4])) < 1  # half of the steps
            else:
                assert abs(item.gaps(precision)[-1]) < 5
                assert max(map(abs, item.mean_gaps(precision))) < 1.8
                assert abs(item.mean_gaps(precision)[-1]) < 1.15
                assert item.of(precision).skipped == 0 or precision == "fp16"
        if item.metric == "accuracy":
            metrics = [found.metric or 0.0 for found in (item.fp32, *item.formats)]
            assert max(metrics) - min(metrics) < 0.02
    tasks = {item.task: item for item in result.tasks}
    convnet = tasks["convnet"]
    assert convnet.of("fp8").curves == convnet.of("bf16").curves
    assert convnet.noise().rounding > convnet.noise().seeds / 4
    for name, item in tasks.items():
        assert item.noise().rounding < item.noise().seeds / 100 or name == "convnet"
    exact = tasks["regression, exact targets"]
    assert fmean(exact.of("fp8").losses()) == pytest.approx(1.29 * fmean(exact.fp32.losses()), rel=0.005)
    assert tasks["regression"].fp32.metric == pytest.approx(0.87**-0.5, rel=0.005)  # the noise in its targets is 1
    assert tasks["vision transformer"].gaps("fp8")[3] == pytest.approx(-4.27, abs=0.05)
    *others, last = tasks["language model"].gaps("fp16", 0)
    assert last > 6
    assert max(map(abs, others)) < 0.02
