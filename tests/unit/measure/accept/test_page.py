"""The page of an acceptance made by hand, compared with ``page.md``.

``python -m tests.unit.measure.accept.test_page`` writes that file again.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dtrain.measure.accept.curves import REFERENCE, REFERENCE_JOB
from dtrain.measure.accept.job import CUT, FAILED, LATE, Ended
from dtrain.measure.accept.page import Acceptance, compiled_report, render, summary
from dtrain.measure.accept.parts import memory, optimizer, rates
from dtrain.measure.accept.steps import CHUNKED, DTRAIN, EAGER, FSDP2, PLAIN, TENSORWISE
from tests.unit.measure.accept.made import H100, ended, phase, step

GOLDEN = Path(__file__).parent / "page.md"
MACHINE: dict[str, Any] = {
    "device": "cuda", "name": H100, "memory_gib": 79.6, "power_limit_w": 700.0, "packages": {"torch": "2.13.0"},
}  # fmt: skip
GIB = 2**30
STATES = {"compute": 2 * GIB, "master": 4 * GIB}
LINEARS = [
    {
        "name": f"blocks.{number}", "out_features": out, "in_features": 2048, "format": kind,
        "reason": f"timed {fp8 / bf16:.2f} of BF16", "bf16_ms": bf16, "float8_ms": fp8,
    }
    for number in range(2)
    for out, kind, bf16, fp8 in ((3072, "bf16", 0.4, 0.41), (16384, "fp8", 2.0, 1.3))
]  # fmt: skip
COMPILED = {"figures": {"graphs": 1, "graph_breaks": 2, "first_step_s": 31.25, "warnings": ["cut here"]}}
HEAD = {"micro_batch": 2, "peak": 12 * GIB, "gradients": 11 * GIB, "full_logits": 4 * GIB, "ms": [2.0], "full_ms": [3]}


def measured(name: str, module: ModuleType, **results: Any) -> Ended:
    """A done job whose results have the texts that its process adds."""
    texts = {"conclusions": module.conclusions(results), "section": module.section(results)}
    return ended(name, module.__name__.rpartition(".")[2], results | texts)


def steps_of_training() -> list[Ended]:
    unknown = {"power_limit_w": None, "sm_clock_mhz": 1230.0}
    fp8: dict[str, Any] = {"losses": [8.0, 7.0, 6.0, 5.005], "linears": LINEARS, "warnings": ["cut"], "state": unknown}
    lost: dict[str, Any] = {"host_kinds": ["master"], "losses": [8.0, None], "formula": STATES, "model_states": STATES}
    stopped = ((DTRAIN, FAILED), (TENSORWISE, LATE), (CHUNKED, CUT), (FSDP2, FAILED), (PLAIN, LATE))
    return [
        step("1.2B", FSDP2, 0, 130.0, device="a new GPU"),
        step("1.2B", DTRAIN, 1, [100.0, 101.0, 99.0], formula=STATES, model_states={**STATES, "gone": 1}),
        step("1.2B", FSDP2, 1, 120.0, device="a new GPU"),
        step("1.2B", TENSORWISE, 1, 80.0, emulates_float8=True, **fp8),
        step("1.2B", EAGER, 0, 150.0, fitted=[3, 4], failed=5, activations=20 * GIB),
        step("1.2B", "offload=cpu", 0, 300.0, **lost),
        *(ended(f"1.2B, {name}, run 3", "steps", status=how, error=f"why {how}") for name, how in stopped),
    ]


def acceptance() -> Acceptance:
    square = [("bf16", 4096, 600.0, 989.4), ("bf16", 8192, 742.0, 989.4), ("fp8", 8192, 1336.0, 1978.9)]
    matmuls = [
        {"label": "square", "m": size, "n": size, "k": size, "format": name, "tflops": tflops, "peak_tflops": peak}
        for name, size, tflops, peak in square
    ]
    copies = [{"name": "copy, read + write", "bytes": 1 << 31, "ms": [0.8], "gb_per_s": 2684.4}]
    curve = [asdict(REFERENCE) | {"losses": [4.0, 3.0, 2.0], "skipped": []}]
    jobs = [
        *steps_of_training(),
        measured("rates", rates, device=H100, matmuls=matmuls, copies=copies, left_out={"fp8 fast": "no time"}),
        measured("optimizer", optimizer, device=H100, cases=[phase(), phase("50M", 50_000_000, trace=None)]),
        measured("loss head", memory, failures=[], left_out={}, states=[], head=HEAD),
        ended("environment", "environment", status=LATE, error="not finished after 9 s", tail=["in nccl", "killed"]),
        ended("casts", "casts", {"failures": ["quantize: other bits"], "section": ["Casts."], "conclusions": ["97"]}),
        ended("compiled, dtrain", "compiled", COMPILED),
        ended("compiled, FP8 tensorwise", "compiled", status=FAILED, error="no kernel", tail=["Traceback"]),
        ended(REFERENCE_JOB, "curves", {"rows": curve, "begun": None}),
        ended("profile", "profile"),
    ]
    left_out = {"steps": {"1.2B, DeepSpeed": "not installed", "3B, DeepSpeed": "not installed"}, "streams": {"a": "b"}}
    command, date = "dtrain accept goal=figures", "2026-07-29T12:00:00"
    return Acceptance(command, date, "figures", 280.0, MACHINE, jobs, {"3B, dtrain, run 1": "no time left"}, left_out)


def test_the_page() -> None:
    made = acceptance()
    page = render(made)
    assert page == GOLDEN.read_text(encoding="utf-8")
    text = summary(made)
    assert page.startswith(text), "the console shows the page up to the jobs"
    assert text.endswith("\n")
    assert "### Jobs" not in text
    assert len(compiled_report([]).section) == 0


@pytest.mark.parametrize("failures", [[], ["other bits"]])
def test_a_job_under_way_is_no_failure_yet_unless_it_has_found_one(failures: list[str]) -> None:
    under_way = ended("casts", "casts", {"failures": failures}, status="under way")
    assert replace(acceptance(), ended=[under_way]).failures == [f"casts: {line}" for line in failures]


if __name__ == "__main__":
    GOLDEN.write_text(render(acceptance()), encoding="utf-8")
