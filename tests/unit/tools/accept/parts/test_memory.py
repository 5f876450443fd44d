"""Memory: model states on a CPU against the formula, and the head's share and speed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtrain.tools.accept.parts import memory
from dtrain.tools.accept.parts.memory import conclusions, head_share, head_speed, run, section
from tests.unit.tools.accept.made import last, request

EMPTY: dict[str, Any] = {"failures": [], "left_out": {}, "states": []}
HEAD = {"micro_batch": 2, "peak": 12 * 2**30, "gradients": 11 * 2**30, "full_logits": 4 * 2**30}
STATES = [
    {
        "precision": "bf16", "stage": stage, "num_parameters": 1000, "formula": {"master": 4000, "moments": 8000},
        "memory": {"master": 4000 + extra, "moments": 8000, "buffers": 99}, "allocated": 0,
        "ratio": (12_000 + extra) / 12_000,
    }
    for stage, extra in ((0, 0), (1, 120))
]  # fmt: skip


def test_engines_on_a_cpu_hold_what_the_formula_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PRECISIONS", ("bf16",))
    results = last(run(request(tmp_path, what="states")))
    assert (results["failures"], results["left_out"]) == ([], {})
    assert [found["stage"] for found in results["states"]] == [0, 1, 2, 3]
    for found in results["states"]:
        assert 1.0 <= found["ratio"] < 1.02
        held = sum(found["memory"][kind] for kind in found["formula"])
        assert held / sum(found["formula"].values()) == pytest.approx(found["ratio"])


def test_an_engine_that_fails_costs_no_other_and_late_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def states(config: object, stage: int, precision: str, device: object) -> dict[str, Any]:
        if (precision, stage) == ("fp8", 1):
            raise RuntimeError("no kernel")
        return STATES[0]

    monkeypatch.setattr(memory, "_states", states)
    results = last(run(request(tmp_path, what="states")))
    assert results["failures"] == ["states, fp8, stage 1: RuntimeError: no kernel"]
    assert len(results["states"]) == 11
    results = last(run(request(tmp_path, seconds=-1.0, what="states")))
    assert (results["states"], len(results["left_out"])) == ([], 12)


def test_a_cpu_does_not_measure_the_head(tmp_path: Path) -> None:
    results = last(run(request(tmp_path, what="head")))
    assert results["left_out"] == {"loss head": "memory is measured on a GPU"}
    assert section(results) == conclusions(results) == []


def test_share_and_speed_of_the_head() -> None:
    assert head_share(HEAD) == pytest.approx(1 / 4)
    assert head_speed({"ms": [2.0, 4.0, 9.0], "full_ms": [5.0, 3.0, 6.0]}) == pytest.approx(5 / 4)


def test_the_page_has_the_states_or_the_head() -> None:
    assert conclusions(EMPTY | {"states": STATES}) == ["model states at most 1.010 of the formula, at stage 1 in bf16"]
    text = "\n".join(section(EMPTY | {"states": STATES}))
    assert "| 1.0100         | 12.12             | not measured  |" in text
    line = "the loss head takes 12.00 GiB at 2 sequences, beside its gradients 25.0% of full FP32 logits"
    assert conclusions(EMPTY | {"head": HEAD}) == [line]
    timed = EMPTY | {"head": HEAD | {"ms": [4.0], "full_ms": [5.0]}}
    assert conclusions(timed) == [f"{line}, at 1.25 x the speed of compiled full logits"]
    assert section(timed)[0] == conclusions(timed)[0]
