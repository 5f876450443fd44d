"""The table of targets from results made by hand: an H100 with 4 GFLOP a token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtrain.config.tool_schema import STEP_CASES
from dtrain.measure.accept.targets import table_of_targets
from dtrain.measure.bench.records import (
    AnyResults,
    BenchmarkCase,
    CaseResult,
    Footprint,
    OperationResults,
    OperationTiming,
    TableResults,
    TimedSteps,
    TrainingResults,
)
from dtrain.measure.bench.targets import TARGETS
from tests.unit.measure.bench.made import HOST

H100 = "NVIDIA H100 80GB HBM3"
BILLION = 1_240_000_000
HEAD: dict[str, Any] = {"command": "dtrain bench", "date": "now", "host": HOST}


def case(name: str, ms: float, losses: tuple[float, ...] = (8.0, 7.0, 6.0, 5.0), **more: Any) -> CaseResult:
    """One round of a case whose states are the formula's."""
    is_peer = "engine" in STEP_CASES[name]
    own = BenchmarkCase(name, "plain" if is_peer else "native", 1, "bf16", None if is_peer else 2)
    states = {"master": 4 * 2**30}
    facts = {"flops_causal": 4e9, "flops_full": 5e9, "num_parameters": BILLION, "state": states} | more
    footprint = Footprint(
        **{"formula": None if is_peer else states, "peak_rss": 0, "peak_device": 0, "device": H100, **facts}
    )
    return CaseResult(own, 9.0, TimedSteps([], [], 0.0), [TimedSteps([ms], list(losses), 0.0)], footprint, 2)


def steps(*cases: CaseResult) -> TrainingResults:
    config = {"model": {"max_seq_len": 4096}, "bench": {"micro_batch_size": 2, "rounds": 1}}
    return TrainingResults("step", 8192, list(cases), [], config=config, **HEAD)


def rows_of(suite: str, *rows: dict[str, Any]) -> TableResults:
    return TableResults(suite, "", [], [], list(rows), config={}, **HEAD)  # type: ignore[misc]


def profile(share: float, launches: int, **waits: int) -> TableResults:
    phase = {"copy_share": share, "num_launches": launches, "synchronizations": waits}
    classes = {"matmul": 50.0, "attention": 10.0, "cast": 25.0, "optimizer": 5.0}
    row = {"precision": "bf16", "num_parameters": BILLION, "optimizer": phase, "ms_by_class": classes}
    return rows_of("profile", row | {"idle_ms": 10.0, "wall_ms": 100.0})


def head(beside: float, ms: float, **config: int) -> OperationResults:
    shares = {"peak": 3.0, "beside the gradients": beside}
    cases = {"full logits, compiled": 4.0, "dtrain, 512 rows": ms}
    timings = [OperationTiming(name, 0, [value], "bf16", shares=shares) for name, value in cases.items()]
    timings += [replace(one, workload="fp32", ms=[99.0]) for one in timings]
    sizes = {"bench": {"hidden_dim": 2048, "vocab_size": 128256} | config}
    return OperationResults("loss-head", 0.0, "", None, [], timings, config=sizes, **HEAD)  # type: ignore[misc]


def rows(*results: AnyResults) -> dict[str, tuple[str, ...]]:
    """Figure, target, status and what to do, by what was measured."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table_of_targets(results).splitlines()[2:]]
    return {what: tuple(rest) for _, what, *rest in cells}


def test_without_results_every_target_is_a_row_that_says_how_to_measure_it() -> None:
    found = rows()
    assert {row[2:] for row in found.values()} == {("not measured", "measure it: `dtrain accept goal=figures`")}
    cells = [line.split("|")[1].strip() for line in table_of_targets([]).splitlines()[2:]]
    assert set(cells) == {target.key for target in TARGETS} == {f"G{number}" for number in range(1, 8)}


def test_mfu_is_that_of_the_faster_of_two_cases() -> None:
    # 2 x 4,096 tokens in 64 ms are 128,000 a second; at 4 GFLOP each 512 of 989.4 TFLOP/s
    found = rows(steps(case("dtrain", 70.0)), steps(case("chunked", 64.0), case("dtrain", 70.0)))
    assert found["MFU, 1.2B"] == ("51.7% (chunked)", "at least 50%", "met", "")
    assert found["MFU, 3B"][2] == "not measured"
    found = rows(steps(case("dtrain", 80.0)), profile(0.95, 5))
    assert found["MFU, 1.2B"][2:] == ("NOT MET", "cast takes 25% of the step in bf16: see its profile")


FP8_SPEED, FP8_LOSS = "speed over dtrain, tensorwise, 1.2B", "loss from dtrain's, tensorwise"
BANDWIDTH = "optimizer phase, of the copy's bandwidth"
LAUNCHES, WAITS = "launches of the optimizer phase", "waits of the host in it"
STATES, HEAD_SPEED = "states over the formula", "speed over compiled full logits"
HEAD_MEMORY = "memory beside the gradients, of full FP32 logits"
FORMULA = {"master": 4 * 2**30, "compute": 2**30}
HELD = {"master": 9 * 2**30, "compute": 2**30, "other": 2**40}
OFFLOADED = steps(case("dtrain", 100.0, formula=FORMULA, state=HELD, host_kinds=["master"]))
MEMORY = [{"precision": "bf16", "stage": 3, "num_parameters": n, "ratio": r} for n, r in ((BILLION, 1.03), (9, 2.0))]
GOOD_PHASE, BAD_PHASE = profile(0.90, 5), profile(0.89, 6, cudaStreamSynchronize=2)


def beside(name: str, ms: float, last: float | None = 5.0, **more: Any) -> list[AnyResults]:
    """A case beside dtrain's, which takes 100 ms and whose last loss is 5."""
    own = case("dtrain", 100.0, **more)
    return [steps(own, case(name, ms, (8.0, 7.0, 6.0, last), **more))]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("results", "what", "figure", "status"),
    [
        (beside("fsdp2", 110.0), "speed over fsdp2", "1.100 (dtrain)", "met"),
        (beside("fsdp2", 109.0), "speed over fsdp2", "1.090 (dtrain)", "NOT MET"),
        (beside("deepspeed", 129.0), "speed over deepspeed", "1.290 (dtrain)", "NOT MET"),
        (beside("plain", 99.0), "speed over plain", "0.990 (dtrain)", "met"),
        *[
            (beside(peer, 110.0, num_parameters=9**7), f"speed over {peer}", "", "not measured")
            for peer in ("fsdp2", "deepspeed", "plain")
        ],
        (beside("tensorwise", 84.0, 5.01), FP8_SPEED, "1.190 (tensorwise)", "met"),
        (beside("tensorwise", 84.0, 5.01), FP8_LOSS, "0.20% (tensorwise)", "met"),
        (beside("tensorwise", 85.0, 5.02), FP8_SPEED, "1.176 (tensorwise)", "NOT MET"),
        (beside("tensorwise", 85.0, 5.02), FP8_LOSS, "0.40% (tensorwise)", "NOT MET"),
        (beside("tensorwise", 84.0, 4.98), FP8_LOSS, "-0.40% (tensorwise)", "NOT MET"),
        (beside("tensorwise", 84.0, None), FP8_LOSS, "", "not measured"),
        (beside("blockwise", 90.0, 5.005), "loss from dtrain's, blockwise", "0.10% (blockwise)", "met"),
        (beside("blockwise", 90.0, 5.006), "loss from dtrain's, blockwise", "0.12% (blockwise)", "NOT MET"),
        (beside("reproducible", 102.9), "slower than dtrain, reproducible, 1.2B", "2.9% (reproducible)", "met"),
        (beside("reproducible", 104.0), "slower than dtrain, reproducible, 1.2B", "4.0% (reproducible)", "NOT MET"),
        ([GOOD_PHASE], BANDWIDTH, "90.0% (bf16)", "met"),
        ([GOOD_PHASE], LAUNCHES, "5 (bf16)", "met"),
        ([GOOD_PHASE], WAITS, "0 (bf16)", "met"),
        # the worse of two counts
        ([GOOD_PHASE, BAD_PHASE], BANDWIDTH, "89.0% (bf16)", "NOT MET"),
        ([GOOD_PHASE, BAD_PHASE], LAUNCHES, "6 (bf16)", "NOT MET"),
        ([GOOD_PHASE, BAD_PHASE], WAITS, "2 (bf16)", "NOT MET"),
        ([OFFLOADED], STATES, "1.000 (dtrain)", "met"),  # those on the device
        ([OFFLOADED, rows_of("memory", *MEMORY)], STATES, "1.030 (bf16, stage 3)", "NOT MET"),
        ([head(0.05, 4.0)], HEAD_MEMORY, "5.0% (dtrain, 512 rows)", "met"),
        ([head(0.05, 4.0)], HEAD_SPEED, "1.000 (dtrain, 512 rows)", "met"),
        ([head(0.051, 4.1)], HEAD_MEMORY, "5.1% (dtrain, 512 rows)", "NOT MET"),
        ([head(0.051, 4.1)], HEAD_SPEED, "0.976 (dtrain, 512 rows)", "NOT MET"),
        ([head(0.05, 4.0, vocab_size=512)], HEAD_SPEED, "", "not measured"),
    ],
)
def test_each_target(results: list[AnyResults], what: str, figure: str, status: str) -> None:
    assert rows(*results)[what][::2] == (figure, status)
