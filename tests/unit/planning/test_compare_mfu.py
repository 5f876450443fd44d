"""Published MFUs, and what is recorded of their prediction."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dtrain.cli.resolve import compose
from dtrain.planning.devices import find_device
from dtrain.planning.planned_run import PlannedRun
from dtrain.planning.time.prediction import RING_FP32, Assumptions
from dtrain.planning.time.prediction import predict as predict_step
from tests.measure.compare_mfu import (
    COMPARED,
    PEAKS,
    PUBLISHED,
    RESULTS,
    compare,
    keys,
    model_flops,
    predict,
    summaries,
    table,
)

READ: dict[str, Any] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
RECORDED: dict[str, Any] = json.loads(COMPARED.read_text(encoding="utf-8"))


def test_published_figures_follow_from_the_tokens_a_second() -> None:
    assert len(READ["rows"]) >= 20
    for row in READ["rows"]:
        assert row["source"] in READ["sources"]
        flops = model_flops(row, READ["models"][row["model"]])
        percent = 100 * row["tokens_per_s_per_gpu"] * flops / PEAKS[row["device"].split("-")[0]]
        assert percent == pytest.approx(row["mfu_percent"], abs=0.01), row["name"]
        published = row["published"]
        if published["unit"] == "MFU %":
            assert percent == pytest.approx(published["value"], abs=0.1), row["name"]
        elif published["unit"] == "TFLOP/s":
            assert row["tokens_per_s_per_gpu"] * flops == pytest.approx(published["value"] * 1e12, rel=1e-3)
        else:
            assert published == {"value": row["tokens_per_s_per_gpu"], "unit": "tokens/s/GPU"}


def test_each_row_is_recorded_and_on_the_page() -> None:
    rows = RECORDED["rows"]
    assert {row["name"]: row["published"] for row in rows} == {row["name"]: row["mfu_percent"] for row in READ["rows"]}
    assert RECORDED["summaries"] == summaries(rows)
    assert table(rows) in (RESULTS / "README.md").read_text(encoding="utf-8")


@pytest.mark.exhaustive
def test_a_prediction_gives_the_recorded_figures() -> None:
    row = next(one for one in READ["rows"] if one["name"] == "MPT-125M A100-40, 16")
    recorded = next(one for one in RECORDED["rows"] if one["name"] == row["name"])
    assert compare(row, READ["models"][row["model"]]) == recorded


@pytest.mark.exhaustive
def test_two_numbers_of_layers_give_the_step_of_all() -> None:
    row = next(one for one in READ["rows"] if one["name"] == "MPT-125M A100-40, 16")
    model, assumed = READ["models"][row["model"]], Assumptions(row["network"], gradients=RING_FP32)
    run = PlannedRun.of(compose(keys(row, model, model["layers"])), find_device(row["device"]), row["gpus"])
    assert predict(row, model) == pytest.approx(predict_step(run, assumed).step.seconds, rel=0.01)
