"""The page of an acceptance made by hand, compared with ``page.md``.

``python -m tests.unit.measure.accept.test_page`` writes that file again.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.measure.accept.job import CUT, DONE, FAILED, LATE, UNDER_WAY, Ended
from dtrain.measure.accept.lines import read_lines
from dtrain.measure.accept.page import Acceptance, render, summary
from dtrain.measure.accept.tests_report import read_records
from dtrain.measure.bench.records import TableResults
from dtrain.telemetry.host import Host
from dtrain.telemetry.metrics import to_json
from dtrain.tools.tables import Table

GOLDEN = Path(__file__).parent / "page.md"
H100 = "NVIDIA H100 80GB HBM3"
MACHINE: dict[str, Any] = {
    "device": "cuda", "name": H100, "memory_gib": 79.6, "power_limit_w": 700.0, "packages": {"torch": "2.13.0"},
}  # fmt: skip
PRODUCTS = TableResults(
    suite="products",
    command="dtrain bench products",
    date="2026-07-29T12:00:00",
    host=Host(**dict.fromkeys(Host.__dataclass_fields__, None)),  # type: ignore[arg-type]
    config={},
    description="Random data.",
    tables=[Table("Products", ("TFLOP/s", "bf16"), [("square", "742")]), Table("Copies", ("copy", "GB/s"), [])],
    conclusions=["highest matrix rates, TFLOP/s: bf16 742"],
    rows=[],
    failures=["a format does not work"],
    left_out={"fp8 fast": "no time left", "fp8": "no time left"},
)
STEPS = [
    {"step": "import torch", "s": 5.0, "found": "2.13.0", "error": ""},
    {"step": "device", "s": 0.01, "found": "{'GiB': 79.6}", "error": ""},
    {"step": "import deepspeed", "s": 0.5, "found": "", "error": "ImportError: none"},
    {"step": "Triton kernel", "s": 0.5, "found": "", "error": "ArithmeticError: the result is 1"},
]


def curve(engine: str, stage: int, precision: str, status: str, **more: Any) -> dict[str, Any]:
    row = {"engine": engine, "zero_stage": stage, "precision": precision, "status": status, "reason": ""}
    return row | {"deviation": 1e-5, "bound": 5e-3, "losses": [4.0], "seconds": 1.0} | more


CURVES = {
    "reference": [4.0, 3.0, 2.0],
    "rows": [
        curve("native", 2, "fp8", "left out", reason="no FP8 Tensor Cores", losses=[]),
        curve("native", 2, "bf16", "agrees"),
        curve("native", 3, "bf16", "deviates", deviation=0.1, reason="off at step 3"),
        curve("native", 2, "fp32", "deviates", deviation=None, bound=5e-5, reason="not finite"),
        curve("native", 3, "fp32", "failed", deviation=None, bound=None, losses=[], reason="no kernel"),
    ],
}


def record(test: str, outcome: str, text: str = "", when: str = "call", **more: Any) -> str:
    begin = json.dumps({"begin": test, "t": 1.0})
    line = {"test": test, "when": when, "outcome": outcome, "s": 1.0, "text": text}
    return f"{begin}\n{json.dumps(line | more)}\n"


RECORDS = "".join(
    [
        record("tests/gpu/test_engine.py::test_passes", "passed"),
        record("tests/gpu/test_engine.py::test_fails", "failed", "def test_fails():\nE   assert 1 == 2"),
        record("tests/gpu/test_engine.py::test_dies", "failed", "E   illegal", "setup", dead="CUDA error"),
        record("tests/gpu/test_kernels.py::test_skipped", "skipped", "Skipped: older than Ampere"),
        '{"begin": "tests/gpu/test_kernels.py::test_crashes", "t": 1.0}\n{"test": "half a line',
    ]
)


def ended(name: str, part: str, results: str, status: str = DONE, **more: Any) -> Ended:
    return Ended(name, part, f"dtrain {name}", status, 30.0, f"results/{results}", **more)


def acceptance(folder: Path) -> Acceptance:
    """An acceptance whose results lie in ``folder``."""
    for name, text in {
        "products.json": to_json(asdict(PRODUCTS)),
        "first_uses.json": to_json({"host": {"python": "3.11", "packages": {"torch": "2.13.0"}}, "steps": STEPS}),
        "curves/report.json": to_json(CURVES),
        "tests.jsonl": RECORDS,
        "broken.json": "{}",
    }.items():
        path = folder / "results" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    jobs = [
        ended("products", "rates", "products.json"),
        ended("first uses", "environment", "first_uses.json"),
        ended("curves of native", "curves", "curves/report.json"),
        ended("tests", "tests", "tests.jsonl"),
        ended("casts", "casts", "none.json", LATE, error="killed after 9 s: this is its limit", tail=["in nccl", "x"]),
        ended("profile of fp8", "profile", "none.json", FAILED, error="was ended by SIGSEGV: no output"),
        ended("profile of bf16", "profile", "broken.json"),
        ended("3B", "steps", "none.json", CUT, error="killed after 5 s: no time was left"),
    ]
    command, date = "dtrain accept goal=figures", "2026-07-29T12:00:00"
    not_run, left_out = {"loss head": "no time left"}, {"compiled, FSDP2": "no GPU"}
    return Acceptance(command, date, "figures", 280.0, MACHINE, jobs, not_run, left_out)


def page_of(folder: Path) -> str:
    return render(acceptance(folder), folder).replace(str(folder), "OUT")


def test_the_page(tmp_path: Path) -> None:
    made, page = acceptance(tmp_path), page_of(tmp_path)
    assert page == GOLDEN.read_text(encoding="utf-8")
    text = summary(made, tmp_path)
    assert page.startswith(text), "the console shows the page up to the jobs"
    assert text.endswith("\n")
    assert "### Jobs" not in text
    plain = made.as_plain(tmp_path)
    assert plain["ended"][2]["results"] == CURVES


@pytest.mark.parametrize(("status", "is_crash"), [(DONE, 1), (FAILED, 1), (LATE, 0), (CUT, 0), (UNDER_WAY, 0)])
def test_a_test_without_an_end_has_crashed_unless_the_command_killed_it(
    status: str, is_crash: int, tmp_path: Path
) -> None:
    tests = replace(acceptance(tmp_path).ended[3], status=status)
    crash = "tests/gpu/test_kernels.py::test_crashes: its process ended in it"
    assert read_lines(tests, tmp_path).failures.count(crash) == is_crash


def test_half_a_record_does_not_count_and_the_worse_phase_of_a_test_does(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    lines = ['{"begin": "a"}', '{"test": "a", "outcome": "failed", "when": "call"}']
    lines += ['{"test": "a", "outcome": "skipped", "when": "teardown"}', '{"begin": "b"}', '{"test": "b", "outc']
    path.write_text("\n".join(lines))
    found = read_records(path)
    assert found["b"] is None
    assert (found["a"] or {})["outcome"] == "failed"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        GOLDEN.write_text(page_of(Path(name)), encoding="utf-8")
