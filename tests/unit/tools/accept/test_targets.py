"""Targets: met, not met or not measured, from figures by hand."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain.tools.accept import steps
from dtrain.tools.accept.job import Ended
from dtrain.tools.accept.targets import TargetResult, check_targets, table
from tests.unit.tools.accept.made import H100, ended, step

WAIT = {"cudaStreamSynchronize": 2}
# 512 MiB of full logits; the head of each case takes 25 MiB or 30 MiB beside its gradients of 100 MiB
HEAD = {"gradients": 100 * 2**20, "full_logits": 512 * 2**20, "full_ms": [3.0, 2.0, 9.0]}


def found(results: list[Ended], what: str) -> TargetResult:
    """The one target that was measured and whose name begins with ``what``."""
    (result,) = (result for result in check_targets(results) if result.what.startswith(what))
    return result


def states(ratio: float, num_parameters: int = 50_000_000) -> list[Ended]:
    row = {"precision": "fp8", "stage": 3, "num_parameters": num_parameters, "ratio": ratio}
    return [ended("states", "memory", {"states": [row | {"ratio": 1.0, "stage": 0}, row]})]


def head(peak_mib: int, **times: Any) -> list[Ended]:
    return [ended("loss head", "memory", {"states": [], "head": HEAD | {"peak": peak_mib * 2**20} | times})]


def optimizer(launches: int = 5, waits: dict[str, int] | None = None, ms: float = 10.0, device: str = H100) -> Ended:
    """30 GB in 10 ms, while 2 GB are copied in 0.6 ms: 3,000 GB/s of 3,333."""
    trace = {"num_launches": launches, "synchronizations": waits or {}, "top": [{"name": "_adamw", "calls": 3}]}
    case = {"num_parameters": 1_000_000_000, "copy_bytes": 2_000_000_000, "trace": trace}
    case["ms"] = {"dtrain": [ms, ms, 99.0], "copy": [0.6, 0.6, 0.7]}
    smaller = case | {"num_parameters": 1000, "trace": None}
    return ended("optimizer", "optimizer", {"device": device, "cases": [smaller, case]})


def pair(name: str, ms: float, model: str = "1.2B", baseline_ms: float = 100.0, **figures: Any) -> list[Ended]:
    return [step(model, steps.DTRAIN, 1, baseline_ms), step(model, name, 1, ms, **figures)]


def test_every_target_is_listed_before_it_is_measured() -> None:
    results = check_targets([])
    assert sorted({result.key for result in results}) == [f"G{number}" for number in range(1, 8)]
    assert {result.met for result in results} == {None}
    text = table(results)
    assert text.count("| not measured | measure it: `dtrain accept goal=figures`") == len(results)
    assert "MET" not in text


# with 4 GFLOP a token and 2 x 4,096 tokens a step, 989.4 TFLOP/s are 33.12 ms
@pytest.mark.parametrize(
    ("results", "what", "figure", "met"),
    [
        ([step("1.2B", steps.DTRAIN, 0, 66.0)], "MFU in BF16, 1.2B", "50.2% causal, 62.7% full (dtrain, 700 W", True),
        ([step("1.2B", steps.DTRAIN, 0, 67.0)], "MFU in BF16, 1.2B", "49.4% causal", False),
        ([step("3B", steps.DTRAIN, 0, 61.0)], "MFU in BF16, 3B", "54.3% causal", True),
        ([step("3B", steps.DTRAIN, 0, 62.0)], "MFU in BF16, 3B", "53.4% causal", False),
        (pair(steps.CHUNKED, 60.0), "MFU in BF16, 1.2B", "55.2% causal, 69.0% full (dtrain, chunked loss", True),
        ([step("1.2B", steps.DTRAIN, device="a new GPU")], "MFU in BF16, 1.2B", "", None),
        (pair(steps.FSDP2, 110.0), "speed over FSDP2, 1.2B", "1.100", True),
        (pair(steps.FSDP2, 109.0), "speed over FSDP2, 1.2B", "1.090", False),
        (pair(steps.FSDP2, 111.0, "3B"), "speed over FSDP2, 3B", "1.110", True),
        (pair(steps.DEEPSPEED, 129.0), "speed over DeepSpeed, 1.2B", "1.290", False),
        (pair(steps.PLAIN, 99.5), "speed over plain AMP, 1.2B", "0.995", True),
        (pair(steps.PLAIN, 98.0), "speed over plain AMP, 1.2B", "0.980", False),
        (pair(steps.TENSORWISE, 84.0), "FP8 over BF16, 1.2B", "1.190", True),
        (pair(steps.TENSORWISE, 85.0), "FP8 over BF16, 1.2B", "1.176", False),
        (pair(steps.TENSORWISE, 79.0, "3B"), "FP8 over BF16, 3B", "1.266", False),
        (pair(steps.TENSORWISE, 80.0, losses=[8, 7, 6, 5.01]), "loss of FP8", "+0.200% at 1.2B", True),
        (pair(steps.TENSORWISE, 80.0, losses=[8, 7, 6, 4.98]), "loss of FP8", "-0.400% at 1.2B", False),
        ([optimizer(ms=9.99)], "optimizer phase", "90.1%", True),
        ([optimizer(ms=10.1)], "optimizer phase", "89.1%", False),
        ([optimizer()], "launches", "5", True),
        ([optimizer(6)], "launches", "6", False),
        ([optimizer()], "waits", "0", True),
        ([optimizer(waits=WAIT)], "waits", "2 cudaStreamSynchronize", False),
        (states(1.02), "model states", "1.0200 (fp8, stage 3)", True),
        (states(1.03), "model states", "1.0300 (fp8, stage 3)", False),
        (states(1.03, 100_000), "model states", "", None),
        (
            [step("1.2B", steps.DTRAIN, formula={"master": 1, "moments": 2}, model_states={"master": 1, "moments": 3})],
            "model states",
            "1.3333 (1.2B, dtrain)",
            False,
        ),
        (head(125), "loss head beside", "4.9%", True),
        (head(130), "loss head beside", "5.9%", False),
        (head(125), "loss head, speed", "", None),
        (head(125, ms=[2.0, 3.0, 3.5]), "loss head, speed", "1.00", True),
        (head(125, ms=[2.0, 3.5, 3.5]), "loss head, speed", "0.86", False),
        (pair(steps.REPRODUCIBLE, 102.9), "`reproducible=true`", "+2.9%", True),
        (pair(steps.REPRODUCIBLE, 104.0), "`reproducible=true`", "+4.0%", False),
    ],
)  # fmt: skip
def test_a_figure_meets_its_target_or_does_not(results: list[Ended], what: str, figure: str, met: bool | None) -> None:
    result = found(results, what)
    assert result.figure.startswith(figure)
    assert bool(result.figure) is bool(figure)
    assert result.met is met
    assert result.row[4] == {True: "met", False: "NOT MET", None: "not measured"}[met]
    assert (result.row[5] == "") is (met is True)


def test_the_optimizer_on_a_cpu_is_not_measured() -> None:
    results = [result for result in check_targets([optimizer(6, WAIT, device="cpu")]) if result.key in ("G3", "G4")]
    assert [result.met for result in results] == [None, None, None]


def test_a_target_that_is_not_met_names_what_is_slowest() -> None:
    def profile(precision: str, ms: dict[str, float]) -> Ended:
        row = {"ms_by_class": {"matmul": 50.0, "attention": 20.0, **ms}, "idle_ms": 5.0, "wall_ms": 100.0}
        return ended(f"profile of {precision}, chunked loss", "profile", {"cases": [row]})

    slow = [step("1.2B", steps.DTRAIN, 0, 90.0), step("1.2B", steps.TENSORWISE, 0, 89.0), optimizer(6, WAIT, 11.0)]
    profiles = [profile("bf16", {"elementwise": 12.0, "cast": 6.0}), profile("fp8", {"cast": 4.0})]
    todo = {result.what: result.row[5] for result in check_targets([*slow, *profiles])}
    assert todo["MFU in BF16, 1.2B"] == "elementwise takes 12% of the step: see its profile"
    assert todo["FP8 over BF16, 1.2B"] == "idle takes 5% of the step: see its profile"
    assert todo["optimizer phase, of the copy's bandwidth"] == "look at `_adamw`, its slowest kernel"
    assert todo["launches of the optimizer phase"] == "join them: 3 `_adamw`"
    assert todo["waits of the host in it"] == "find what calls 2 cudaStreamSynchronize"
    assert found(slow, "MFU in BF16, 1.2B").row[5] == "profile a step: `dtrain accept goal=figures`"
