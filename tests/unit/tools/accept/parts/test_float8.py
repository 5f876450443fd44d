"""Part e: its plan, the comparison of losses, the choice for each Linear, its page, and one run on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.tools.accept.part import PartRequest
from dtrain.tools.accept.parts import float8
from dtrain.tools.accept.parts.case_worker import CaseJob
from dtrain.tools.accept.parts.float8 import (
    BF16,
    TENSORWISE,
    choice_rows,
    conclusions,
    loss_difference,
    loss_failures,
    plan,
    section,
)
from tests.unit.tools.accept.parts.made import record

LINEARS = [
    {
        "name": f"blocks.{number}.{name}",
        "out_features": out,
        "in_features": 2048,
        "format": kind,
        "reason": f"timed {fp8 / bf16:.2f} of BF16",
        "bf16_ms": bf16,
        "float8_ms": fp8,
    }
    for number in range(2)
    for name, out, kind, bf16, fp8 in (("qkv", 3072, "bf16", 0.4, 0.41), ("gate_up", 16384, "fp8", 2.0, 1.3))
]


def test_the_plan_alternates_and_each_fp8_run_has_a_recipe() -> None:
    runs = plan(small=False)
    assert [run.name for run in runs[:3]] == [BF16, TENSORWISE, BF16]
    for run in [*runs, *plan(small=True)]:
        assert (run.case.recipe is None) == (run.case.precision == "bf16") == run.name.startswith(BF16)
        assert run.options["is_text"]
        assert set(run.options) <= set(CaseJob.__dataclass_fields__)


def test_losses_are_compared_between_runs_of_the_same_steps() -> None:
    fp8 = [record(TENSORWISE, "1.2B", 0, 2, [90.0], losses=[9.0] * 6 + [6.03, 5.05])]
    smaller = record(BF16, "1.2B", 0, 1, [100.0], losses=[9.0] * 8)
    shorter = record(BF16, "1.2B", 1, 2, [100.0], losses=[9.0, 8.0])
    same = record(BF16, "1.2B", 1, 2, [100.0], losses=[9.0] * 6 + [6.0, 5.0])
    assert loss_difference(fp8, [smaller, shorter]) is None
    # two of eight
    assert loss_difference(fp8, [smaller, same]) == pytest.approx(11.08 / 11.0 - 1)
    lost = [record(TENSORWISE, "1.2B", 0, 2, [90.0], losses=[9.0] * 6 + [None, 5.0])]
    assert loss_difference(lost, [same]) is None


def test_a_loss_too_far_from_bf16_is_a_failure() -> None:
    baseline = record(BF16, "1.2B", 0, 2, [100.0])
    near = record(TENSORWISE, "1.2B", 0, 2, [80.0], losses=[8.0, 7.0, 6.01, 5.01])
    far = record(TENSORWISE, "1.2B", 0, 2, [80.0], losses=[8.0, 7.0, 6.1, 5.1])
    assert loss_failures({"runs": [vars(baseline), vars(near)]}) == []
    (line,) = loss_failures({"runs": [vars(baseline), vars(far)]})
    assert line == "FP8 tensorwise, 1.2B: the loss is +2.00% from BF16's; at most 0.25%"


def test_the_page_shows_speed_up_and_choice() -> None:
    runs = [
        record(BF16, "3B", 0, 1, [140.0]),
        record(TENSORWISE, "3B", 0, 1, [100.0], losses=[8.0, 7.0, 6.0, 5.005], linears=LINEARS, warnings=["cut"]),
    ]
    results = {"runs": [vars(run) for run in runs]}
    assert conclusions(results) == [
        "G2, 3B, FP8 tensorwise: 1.40 x BF16 (target 1.40), 2 of 4 Linears in FP8; loss against BF16 +0.10% (target "
        "0.25%)."
    ]
    assert choice_rows(runs[1]) == [
        ("3072 x 2048", "2", "0.400", "0.410", "1.02", "bf16", "timed 1.02 of BF16"),
        ("16384 x 2048", "2", "2.000", "1.300", "0.65", "fp8", "timed 0.65 of BF16"),
    ]
    text = "\n".join(section(results))
    assert "1.40 (1.40 to 1.40)" in text
    assert "16384 x 2048" in text
    assert "\ndtrain warned:\n\n- FP8 tensorwise, 3B: cut\n" in text
    assert section({}) == conclusions({}) == ["G2: not measured."]


@pytest.mark.processes
def test_a_run_on_a_cpu_compares_fp8_with_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = plan(small=True)[:2]
    monkeypatch.setattr(float8, "plan", lambda small: first)
    results = float8.run(PartRequest("cpu", 60.0, True, str(tmp_path)))
    assert results["failures"] == []
    assert [run["figures"]["emulates_float8"] for run in results["runs"]] == [False, True]
    formats = [linear["format"] for linear in results["runs"][1]["figures"]["linears"]]
    assert "fp8" in formats
    line, emulated = results["conclusions"]
    assert "loss against BF16 not compared" not in line
    assert "emulated" in emulated
