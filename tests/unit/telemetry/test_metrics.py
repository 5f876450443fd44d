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
from tests.helpers.run_folders import STEP

SUMMARY = metrics.Summary(
    finished=True, steps=10, applied_steps=9, skipped_steps=1, tokens=90, train_loss=2.0, val_loss=math.nan,
    val_loss_ema=None, tokens_per_s=1.0, mfu=None, wall_s=3.0, memory={"master": 4}, memory_formula={"master": 4},
    num_parameters=1, world_size=2, device="cpu", engine="native", precision="bf16", contract={"precision": "bf16"},
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
