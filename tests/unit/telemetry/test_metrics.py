from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.errors import ConfigError
from dtrain.telemetry import metrics
from dtrain.telemetry.metrics import METRICS_FILE, MetricsFile, read_metrics, read_summary
from dtrain.telemetry.progress import BoundedCurve, RunProgress, Skip, last_checkpoint
from tests.helpers.run_folders import STEP

SUMMARY = metrics.Summary(
    finished=True, steps=10, applied_steps=9, skipped_steps=1, tokens=90, train_loss=2.0, val_loss=math.nan,
    val_loss_ema=None, tokens_per_s=1.0, mfu=None, mfu_full=None, gpu=None, wall_s=3.0, memory={"master": 4},
    memory_formula={"master": 4}, num_parameters=1, world_size=2, device="cpu", engine="native", precision="bf16",
    contract={"precision": "bf16"},
)  # fmt: skip


def _write(folder: Path, steps: list[int], start: int = 0) -> None:
    file = MetricsFile(folder, start)
    for step in steps:
        file.step(replace(STEP, step=step))
        file.validation(step, {"val_loss": 1.0})
    file.close(0)


def test_metrics_lines_have_the_documented_keys(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path, 0)
    file.step(STEP)
    skipped = replace(STEP, step=2, applied=False, loss=math.nan, grad_norm=math.inf)
    file.step(replace(skipped, reason="overflow", culprit="rank 1"))
    file.validation(2, {"val_loss": 2.5})
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]  # flushed before close
    file.close(0)
    keys = "step loss lr grad_norm loss_scale applied skipped_steps tokens tokens_per_s step_ms data_wait_ms"
    assert list(lines[0]) == [*keys.split(), "peak_memory"]
    assert [lines[1][key] for key in ("loss", "grad_norm", "reason", "culprit")] == [None, None, "overflow", "rank 1"]
    assert lines[2] == {"step": 2, "val_loss": 2.5}
    gap = replace(STEP, float8_loss_gap=0.5, float8_gradient_cosine=math.nan).to_dict()
    assert list(gap)[-1] == "float8_loss_gap", "of a skipped step there is no cosine"
    assert replace(STEP, compiled_graphs=2).to_dict()["compiled_graphs"] == 2


@settings(max_examples=30)
@given(last=st.integers(0, 12), start=st.integers(0, 12), incomplete=st.booleans())
def test_a_resumed_run_does_not_repeat_lines(tmp_path_factory: Any, last: int, start: int, incomplete: bool) -> None:
    folder = tmp_path_factory.mktemp("run")
    _write(folder, list(range(1, last + 1)))
    if incomplete:
        with (folder / METRICS_FILE).open("a") as file:
            file.write('{"step": 1, "lo')
    _write(folder, list(range(start + 1, 15)), start)
    steps = [line["step"] for line in read_metrics(folder / METRICS_FILE) if "loss" in line]
    assert steps == [*range(1, min(last, start) + 1), *range(start + 1, 15)]


@pytest.mark.parametrize("line", ["not json", "[1]", '{"loss": 1}', '{"step": "3"}'])
def test_an_invalid_line_is_named(tmp_path: Path, line: str) -> None:
    _write(tmp_path, [1])
    path = tmp_path / METRICS_FILE
    path.write_text(f"{line}\n{path.read_text()}")
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 1: expected a JSON object with a number 'step'"):
        MetricsFile(tmp_path, 5)


def test_summary_comes_back_with_null_for_nan(tmp_path: Path) -> None:
    metrics.write_summary(tmp_path, SUMMARY)
    assert read_summary(tmp_path) == replace(SUMMARY, val_loss=None)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"finished": true}'])
def test_an_invalid_summary_is_none(tmp_path: Path, text: str) -> None:
    assert read_summary(tmp_path) is None
    (tmp_path / "summary.json").write_text(text)
    assert read_summary(tmp_path) is None


@given(st.recursive(st.none() | st.floats() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3)))
def test_finite_always_makes_json(value: object) -> None:
    json.loads(json.dumps(metrics.finite({"value": value}), allow_nan=False))


def training(step: int, **changes: Any) -> dict[str, Any]:
    line = {"step": step, "loss": 3.0, "lr": 1e-3, "grad_norm": 1.0, "loss_scale": 1.0, "applied": True}
    return line | {"skipped_steps": 0, "tokens": 512 * step, "tokens_per_s": 1e4, "step_ms": 50.0} | changes


def test_the_time_left_is_the_median_of_the_later_windows() -> None:
    progress = RunProgress(100)
    progress.add(training(10, step_ms=9000.0))  # compiles
    assert progress.eta_s() is None
    for step, step_ms in ((20, 50.0), (30, 60.0), (40, 500.0)):
        progress.add(training(step, step_ms=step_ms))
    assert progress.eta_s() == pytest.approx(60 * 0.060)
    progress.start()
    progress.add(training(50, step_ms=9000.0))
    assert progress.eta_s() is None
    progress.add(training(60, step_ms=20.0))
    assert progress.eta_s() == pytest.approx(40 * 0.020)
    progress.add(training(100))
    assert progress.eta_s() is None


def test_a_skip_keeps_the_numbers_of_the_last_applied_step() -> None:
    progress = RunProgress(None)
    progress.add(training(1, loss=2.5, lr=0.25))
    why = {"applied": False, "reason": "overflow", "culprit": "'a\x1b[2J' on 1"}
    progress.add(training(2, skipped_steps=1, loss=9.0, grad_norm=math.inf, **why))
    assert (progress.step, progress.number("loss"), progress.number("skipped_steps")) == (2, 2.5, 1)
    assert progress.skip == Skip(2, "overflow", "'a\ufffd[2J' on 1")
    assert progress.loss.sampled(9) == [2.5]
    assert progress.eta_s() is None


def test_validation_has_its_own_lines() -> None:
    progress = RunProgress(9)
    progress.add({"step": 4, "val_loss": 2.0, "val_loss_ema": None, "val_\x1b": 1})
    progress.add({"step": 5, "precision": {"applied": 1}})
    assert (progress.step, progress.validated_step) == (0, 4)
    assert progress.val_losses == {"val_loss": 2.0, "val_loss_ema": None}
    assert not progress.has_lines


@settings(max_examples=30)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=3000), st.integers(1, 200))
def test_a_curve_is_bounded_and_within_its_losses(losses: list[float], width: int) -> None:
    curve = BoundedCurve()
    for loss in losses:
        curve.add(loss)
    points = curve.sampled(width)
    assert 1 <= len(points) <= min(width, len(losses))
    assert (curve.low, curve.high) == (min(losses), max(losses))
    room = 1e-9 * max(map(abs, losses))
    assert all(curve.low - room <= point <= curve.high + room for point in points)
    if len(losses) <= width and len(losses) < 512:
        assert points == losses


def test_a_long_curve_keeps_its_form() -> None:
    curve = BoundedCurve()
    for loss in range(100_000, 0, -1):
        curve.add(loss)
    points = curve.sampled(50)
    assert len(curve.sampled(10_000)) <= 512
    assert points == sorted(points, reverse=True)
    assert points[0] > 98_000
    assert points[-1] < 2_000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)
NAMES = st.sampled_from([*training(1), "val_loss", "reason", "culprit", "precision", "slowest_rank"])


@settings(max_examples=40)
@given(st.lists(st.dictionaries(NAMES, JSON, max_size=12), max_size=6))
def test_no_line_is_an_error(lines: list[dict[str, Any]]) -> None:
    progress = RunProgress(10)
    for line in lines:
        progress.add(line)
    numbers = [progress.number(name) for name in training(1)]
    json.dumps([progress.step, progress.eta_s(), progress.skip, progress.loss.sampled(9), *numbers], allow_nan=False)


def test_the_newest_committed_checkpoint(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "none") is None
    for name in ("step-00000009", "step-00000020", "step-00000030.tmp-1f", "bad-step-00000040-hash"):
        (tmp_path / name).mkdir()
    saved = last_checkpoint(tmp_path)
    assert saved is not None
    assert saved == (20, (tmp_path / "step-00000020").stat().st_mtime)
