"""What each goal does, in which order, how it adapts to the machine; and the curves of training that it compares."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from dtrain.config.capabilities import CAPABILITIES
from dtrain.measure.accept import curves
from dtrain.measure.accept.curves import LOSS_BOUNDS, REFERENCE, REFERENCE_JOB, TrainingCase, compare, plan_jobs, report
from dtrain.measure.accept.job import CUT, FAILED, LATE, Ended, PartJob
from dtrain.measure.accept.parts import curves as worker
from dtrain.measure.accept.plan import LIMITS_S, PARTS, Machine, Plan, make_plan
from dtrain.telemetry.metrics import to_json
from tests.unit.measure.accept.made import ended, request

H100, CPU = Machine("cuda", 79.6), Machine("cpu")


@pytest.fixture(autouse=True)
def _all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(CAPABILITIES["ddp"]), "missing_requirement", "")
    monkeypatch.setattr("dtrain.measure.bench.peers.find_spec", lambda name: object())


def names(jobs: Sequence[PartJob]) -> list[str]:
    return [job.name for job in jobs]


def plan(goal: str, machine: Machine = H100, **options: object) -> Plan:
    return make_plan(goal, machine, LIMITS_S[goal], **options)  # type: ignore[arg-type]


def test_facts_ask_side_by_side_what_works_and_time_alone_what_measures_the_host() -> None:
    found = plan("facts")
    assert names(found.together)[:3] == ["environment", "tests", "reference curve"]
    assert {f"curves of {engine}" for engine in CAPABILITIES} < set(names(found.together))
    assert [name for name in names(found.together) if name.startswith("compiled, ")] == [
        "compiled, dtrain", "compiled, FP8 tensorwise", "compiled, FSDP2", "compiled, dtrain, chunked loss",
    ]  # fmt: skip
    assert names(found.alone) == ["tests that measure time", "optimizer", "rates"]
    assert found.together_s == LIMITS_S["facts"] - 110
    by_name = {job.name: job for job in found.jobs}
    assert "tests/gpu/test_streams.py" not in by_name["tests"].options["files"]
    assert by_name["tests that measure time"].options["files"][0] == "tests/gpu/test_streams.py"


def test_figures_begin_with_the_optimizer_and_the_pair_that_the_target_names() -> None:
    found = plan("figures")
    assert names(found.alone)[:5] == [
        "optimizer", "rates", "1.2B, dtrain, run 1", "1.2B, FSDP2, run 1", "1.2B, FP8 tensorwise, run 1",
    ]  # fmt: skip
    assert names(found.together) == [name for name in names(plan("facts").together) if name.startswith("compiled")]
    assert names(plan("figures", has_caches=True).together) == []
    order = names(found.alone)
    assert order.index("profile of bf16, chunked loss") < order.index("1.2B, DeepSpeed, run 1")
    sizes = {job.name: job.options["job"]["micro_batch"] for job in found.alone if job.part == "steps"}
    assert (sizes["1.2B, dtrain, run 1"], sizes["1.2B, dtrain, chunked loss, run 1"]) == (3, 6)
    assert (sizes["3B, dtrain, run 1"], sizes["1.2B, offload=cpu, run 1"]) == (1, 2)


def test_all_is_both_and_measures_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    both, facts, figures = plan("all"), plan("facts"), plan("figures")
    assert set(names(both.jobs)) == {*names(facts.jobs), *names(figures.jobs)}
    assert len(set(names(both.jobs))) == len(both.jobs)
    assert {job.part for job in both.jobs} == set(PARTS)
    assert {job.part for job in plan("all", parts=["rates"]).jobs} == {"rates"}
    monkeypatch.setattr("dtrain.measure.bench.peers.find_spec", lambda name: None)
    assert plan("figures").left_out["steps"]["1.2B, DeepSpeed"] == "package deepspeed is not installed"


def test_a_small_gpu_and_a_cpu_train_tiny_models() -> None:
    for machine in (Machine("cuda", 24.0), CPU):
        found = plan("all", machine)
        assert {name.split(",")[0] for name in names(found.jobs) if ", run " in name} == {"tiny"}
    assert not [job for job in plan("all", CPU).jobs if job.part == "compiled"]


CASE = TrainingCase("native", 2, "bf16")
CURVE = [4.0, 3.0, 2.0]


def test_cases_and_jobs_of_a_gpu_and_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cases, left_out = curves.plan_cases("cuda")
    counts = {engine: sum(case.engine == engine for case in cases) for engine in CAPABILITIES}
    assert counts == {"native": 20, "fsdp2": 10, "deepspeed": 16, "ddp": 5}
    assert (len(set(cases)), cases[0]) == (51, CASE)
    assert list(left_out) == ["deepspeed fp8"]
    jobs, _ = plan_jobs("cuda", 100.0)
    assert [job.name for job in jobs] == [REFERENCE_JOB, *(f"curves of {engine}" for engine in CAPABILITIES)]
    assert [job.options["device"] for job in jobs] == ["cpu", *["cuda"] * 4]
    assert [case for job in jobs for case in job.options["cases"]] == [asdict(case) for case in (REFERENCE, *cases)]
    jobs, left_out = plan_jobs("cpu", 100.0)
    tried = {(case["engine"], case["zero_stage"]) for job in jobs for case in job.options["cases"]}
    assert tried == {("native", 2), ("native", 3), ("ddp", 0)}
    assert (left_out["fsdp2 bf16, stage 3"], left_out["tf32"]) == ("a CPU tries few cases", "no GPU")
    missing = property(lambda self: "needs the package deepspeed" if self.package else "")
    monkeypatch.setattr(type(CAPABILITIES["ddp"]), "missing_requirement", missing)
    cases, left_out = curves.plan_cases("cuda")
    assert not [case for case in cases if case.engine == "deepspeed"]
    assert left_out == {"deepspeed": "needs the package deepspeed"}


def crash(job: PartJob, num_done: int, *, begun: bool = True) -> Ended:
    """The job as it fails after ``num_done`` cases, in the middle of the next one if it has ``begun``."""
    cases = job.options["cases"]
    rows = [case | {"losses": CURVE, "skipped": []} for case in cases[:num_done]]
    results = {"rows": rows, "begun": cases[num_done] if begun else None, "planned": cases}
    return ended(job.name, "curves", results, status=FAILED, error="was ended by SIGSEGV")


def test_after_a_crash_the_other_cases_run_in_a_new_process_at_most_three_times() -> None:
    job = next(job for job in plan_jobs("cuda", 100.0)[0] if job.name == "curves of native")
    assert job.again is not None
    second = job.again(job, crash(job, 2))
    assert second is not None
    assert (second.name, second.options["device"]) == ("curves of native, start 2", "cuda")
    assert second.options["cases"] == job.options["cases"][3:]
    third = job.again(second, crash(second, 1, begun=False))
    assert third is not None
    assert (third.name, third.options["cases"]) == ("curves of native, start 3", job.options["cases"][4:])
    assert job.again(third, crash(third, 1)) is None
    assert job.again(job, crash(job, len(job.options["cases"]) - 1)) is None
    # a process that does not even begin fails for all of its cases
    assert job.again(job, ended(job.name, "curves", {}, status=FAILED, error="ImportError: libx.so")) is None


def test_a_curve_within_its_bound_agrees_and_every_other_has_its_reason() -> None:
    for precision, bound in LOSS_BOUNDS.items():
        case = TrainingCase("native", 2, precision)
        near, far = [4.0, 3.0 * (1 + 0.9 * bound), 2.0], [4.0, 3.0, 2.0 * (1 - 1.1 * bound)]
        assert compare(case, {"losses": near, "skipped": []}, CURVE)["status"] == "agrees"
        row = compare(case, {"losses": far, "skipped": []}, CURVE)
        assert (row["status"], row["deviation"]) == ("deviates", pytest.approx(1.1 * bound))
        assert row["reason"].endswith("at step 3")
    line = json.loads(to_json({"losses": [4.0, float("nan"), 2.0], "skipped": []}))
    row = compare(CASE, line, CURVE)
    assert (row["status"], "nan" in row["reason"], row["reason"][-6:]) == ("deviates", True, "step 2")
    row = compare(CASE, {"losses": CURVE, "skipped": ["step 2: overflow"]}, CURVE)
    assert (row["status"], row["reason"]) == ("deviates", "skipped step 2: overflow")
    row = compare(CASE, {"error": "RuntimeError: no kernel"}, CURVE)
    assert (row["status"], row["deviation"], row["reason"]) == ("failed", None, "RuntimeError: no kernel")


def test_the_bounds_tell_formats_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "STEPS", 6)
    fp32, failing = TrainingCase("native", 2, "fp32"), TrainingCase("fsdp2", 0, "fp32")
    order = [asdict(case) for case in (fp32, failing, CASE)]
    *_, results = worker.run(request(tmp_path, device="cpu", cases=order))
    first, error, low = results["rows"]
    reference = first["losses"]
    assert len(reference) == 6
    assert reference[-1] < reference[0]
    assert "zero_stage=0" in str(error), "a case that fails costs no other"
    assert compare(CASE, low, reference)["status"] == "agrees"
    assert compare(fp32, low, reference)["status"] == "deviates", "FP32 that computes in BF16"


@pytest.mark.parametrize("status", [FAILED, LATE, CUT])
def test_a_crash_is_the_failure_of_the_case_that_had_begun_unless_it_was_cut_short(status: str) -> None:
    line = {"losses": CURVE, "skipped": []}
    reference = ended(REFERENCE_JOB, "curves", {"rows": [asdict(REFERENCE) | line], "begun": None})
    cases = [asdict(TrainingCase("ddp", 0, name)) for name in ("bf16", "fp32", "fp8")]
    results = {"rows": [cases[0] | line], "begun": cases[1], "planned": cases}
    first = ended("curves of ddp", "curves", results, status=status, error="was ended by SIGSEGV")
    found = report([reference, first], {})
    if status == CUT:
        assert (found.failures, list(found.left_out)) == ([], ["ddp fp32, stage 0", "ddp fp8, stage 0"])
        return
    assert found.failures == ["ddp fp32, stage 0 failed: was ended by SIGSEGV"]
    assert found.left_out == {"ddp fp8, stage 0": "no time left, or its process failed before"}
    again = {"rows": [cases[2] | line], "begun": None, "planned": cases[2:]}
    assert report([reference, first, ended("curves of ddp, start 2", "curves", again)], {}).left_out == {}
    whole = report([ended("curves of ddp", "curves", {}, status=status, error="ImportError: libx.so")], {})
    assert whole.failures == [f"curves of ddp {status}: ImportError: libx.so"]
