"""Figures and targets: met, not met or not measured, from figures by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dtrain.config.dump import from_plain
from dtrain.measure.accept import steps
from dtrain.measure.accept.job import FAILED, Ended
from dtrain.measure.accept.models import MODELS, count_flops
from dtrain.measure.accept.parts.step import CaseFigures, CaseJob
from dtrain.measure.accept.steps import CHUNKED, DEEPSPEED, DTRAIN, EAGER, FSDP2, PLAIN, TENSORWISE
from dtrain.measure.accept.targets import TargetResult, check_targets, table
from tests.unit.measure.accept.made import H100, ended, record, step

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
        (pair(steps.CHUNKED, 60.0), "MFU in BF16, 1.2B", "55.2% causal, 69.0% full (dtrain, chunked loss", True),
        ([step("1.2B", steps.DTRAIN, device="a new GPU")], "MFU in BF16, 1.2B", "", None),
        (pair(steps.FSDP2, 110.0), "speed over FSDP2, 1.2B", "1.100", True),
        (pair(steps.FSDP2, 109.0), "speed over FSDP2, 1.2B", "1.090", False),
        (pair(steps.DEEPSPEED, 129.0), "speed over DeepSpeed, 1.2B", "1.290", False),
        (pair(steps.PLAIN, 98.0), "speed over plain AMP, 1.2B", "0.980", False),
        (pair(steps.TENSORWISE, 84.0), "FP8 over BF16, 1.2B", "1.190", True),
        (pair(steps.TENSORWISE, 85.0), "FP8 over BF16, 1.2B", "1.176", False),
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
        ([step("1.2B", steps.DTRAIN, formula={"a": 3}, model_states={"a": 4})], "model states", "1.3333", False),
        (head(125), "loss head beside", "4.9%", True),
        (head(130), "loss head beside", "5.9%", False),
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


@pytest.mark.parametrize("order", [steps.ORDER, steps.SMALL_ORDER])
def test_the_order_has_known_cases_whose_numbers_count_up(order: tuple[tuple[str, str, int], ...]) -> None:
    numbers: dict[tuple[str, str], list[int]] = {}
    for model, name, number in order:
        assert model in MODELS
        numbers.setdefault((model, name), []).append(number)
        job = steps.step_job(model, name, number, device="cuda", threads=4, size=2)
        case = from_plain(CaseJob, job.options["job"])
        assert (case.rank_job.case.name, case.is_text) == (name, number > 0)
        assert case.is_compiled is (name not in (EAGER, "recompute=selective", "recompute=full", "offload=cpu"))
        assert (case.rank_job.case.recipe is None) == (case.rank_job.case.precision == "bf16")
        assert (case.rank_job.config["model"]["loss_chunk"] == "auto") is (name == CHUNKED)
        (found,) = steps.records_of([ended(job.name, job.part)])
        assert (found.model, found.name, found.number) == (model, name, number)
    assert all(own == list(range(len(own))) for own in numbers.values())
    assert {name for _, name in numbers} >= {DTRAIN, FSDP2, DEEPSPEED, PLAIN, TENSORWISE, EAGER}


def test_sequences_grow_with_the_memory_that_model_states_leave() -> None:
    cases = (("1.2B", DTRAIN), ("1.2B", CHUNKED), ("1.2B", EAGER), ("3B", DTRAIN))
    for gib, expected in ((79.6, [3, 6, 2, 1]), (141, [6, 12, 4, 3]), (40, [1, 2, 1, 1]), (20, [1, 1, 1, 1])):
        assert [steps.size_of(model, name, gib) for model, name in cases] == expected
    assert steps.size_of("tiny", DTRAIN, 0.0) == 2


def test_a_run_is_repeated_with_half_the_sequences_only_if_it_was_out_of_memory() -> None:
    job = steps.step_job("1.2B", DTRAIN, 0, device="cuda", threads=4, size=3)
    assert job.again is not None
    failed = ended(job.name, "steps", status=FAILED, error="exit code 1: OutOfMemoryError: CUDA out of memory.")
    smaller = job.again(job, failed)
    assert smaller is not None
    case = from_plain(CaseJob, smaller.options["job"])
    assert (smaller.name, case.micro_batch, case.rank_job.config["bench"]["micro_batch_size"]) == (job.name, 1, 1)
    assert job.again(smaller, failed) is None
    tail = ["RuntimeError: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"]
    again = steps.step_job("1.2B", DTRAIN, 0, device="cuda", threads=4, size=2)
    assert job.again(again, dataclasses.replace(failed, error="exit code 1", tail=tail)) is not None
    assert job.again(again, dataclasses.replace(failed, error="was ended by SIGSEGV: no output")) is None


def test_flops_and_utilization_by_hand() -> None:
    # a layer of 3B: queries and output 3072 x 3072 each, keys and values 3072 x 1024 each, feed-forward 3 x 3072 x 8192
    layer = 2 * 3072 * 3072 + 2 * 3072 * 1024 + 3 * 3072 * 8192
    matmuls, attention = 28 * layer + 3072 * 128_256, 28 * 3072 * 4096
    flops = count_flops(MODELS["3B"])
    assert (flops.causal, flops.full) == (6 * matmuls + 6 * attention, 6 * matmuls + 12 * attention)
    # 2 x 4096 tokens in 125 ms: 65,536 tokens/s, of 4 and 5 GFLOP
    found = record("1.2B", DTRAIN, 0, [130.0, 125.0, 120.0])
    assert found.tokens_per_s == pytest.approx(65_536)
    assert found.utilization == pytest.approx((65_536 * 4e9 / 989.4e12, 65_536 * 5e9 / 989.4e12))
    assert record("1.2B", DTRAIN, device="a new GPU").utilization is None
    assert set(found.figures or {}) == {field.name for field in dataclasses.fields(CaseFigures)}, "as those of a run"


def test_speed_ups_pair_runs_by_their_number_and_count_tokens() -> None:
    own = [record("1.2B", DTRAIN, number, ms, micro_batch=4) for number, ms in ((0, 100.0), (1, 110.0), (2, 90.0))]
    other = [record("1.2B", FSDP2, number, ms) for number, ms in ((1, 99.0), (0, 75.0))]
    # twice the sequences in a step
    assert steps.speed_ups(own, other) == pytest.approx([1.5, 1.8])
    assert steps.speed_ups(own, []) == []
    groups = steps.by_case([*own, *other])
    assert steps.speed_up(groups, "1.2B", DTRAIN, FSDP2) == pytest.approx(1.65)
    assert steps.speed_up(groups, "3B", DTRAIN, FSDP2) is None


def test_losses_are_compared_between_runs_of_the_same_steps_on_text() -> None:
    start, flat = [9.0] * 6, [9.0] * 8
    fp8 = record("1.2B", TENSORWISE, 1, losses=[*start, 6.03, 5.05])
    same = record("1.2B", DTRAIN, 1, losses=[*start, 6.0, 5.0])
    others = [
        record("1.2B", DTRAIN, 0, losses=flat),  # random tokens
        record("1.2B", DTRAIN, 1, micro_batch=1, losses=flat),
        record("1.2B", DTRAIN, 2, losses=[9.0, 8.0]),
    ]
    assert steps.loss_difference([fp8], others) is None
    assert steps.loss_difference([fp8], [*others, same]) == pytest.approx(11.08 / 11.0 - 1), "two of eight"
    for own in (record("1.2B", TENSORWISE, 0, losses=flat), record("1.2B", TENSORWISE, 1, losses=[*start, None, 5])):
        assert steps.loss_difference([own], [*others, same]) is None
