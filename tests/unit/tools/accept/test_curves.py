"""Curves: which cases a machine has, their comparison with the CPU's curve, and engines whose process crashes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.config.capabilities import CAPABILITIES
from dtrain.config.schema import RunConfig
from dtrain.telemetry.metrics import to_json
from dtrain.tools.accept import curves
from dtrain.tools.accept.curves import LOSS_BOUNDS, REFERENCE, REFERENCE_JOB, TrainingCase, compare, plan_jobs, report
from dtrain.tools.accept.job import CUT, DONE, FAILED, LATE, Ended, PartJob
from dtrain.tools.accept.parts import curves as worker
from tests.unit.tools.accept.made import ended, request

CASE = TrainingCase("native", 2, "bf16")
CURVE = [4.0, 3.0, 2.0]


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(CAPABILITIES["ddp"]), "missing_requirement", "")


# -- cases and jobs ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("all_installed")
def test_a_gpu_has_every_engine_precision_and_stage_that_the_table_of_capabilities_has() -> None:
    cases, left_out = curves.plan_cases("cuda")
    by_engine = {engine: [case for case in cases if case.engine == engine] for engine in CAPABILITIES}
    assert {engine: len(own) for engine, own in by_engine.items()} == {
        "native": 20, "fsdp2": 10, "deepspeed": 16, "ddp": 5,
    }  # fmt: skip
    assert len(set(cases)) == len(cases)
    assert list(left_out) == ["deepspeed fp8"]
    assert "without scales" in left_out["deepspeed fp8"]
    assert cases[0] == CASE
    jobs, _ = plan_jobs("cuda", 100.0)
    assert [job.name for job in jobs] == [REFERENCE_JOB, *(f"curves of {engine}" for engine in CAPABILITIES)]
    assert [job.options["device"] for job in jobs] == ["cpu", *["cuda"] * 4]
    assert jobs[0].options["cases"] == [asdict(REFERENCE)]
    assert [case for job in jobs[1:] for case in job.options["cases"]] == [asdict(case) for case in cases]


@pytest.mark.usefixtures("all_installed")
def test_a_cpu_leaves_out_what_it_has_no_arithmetic_for() -> None:
    cases, left_out = curves.plan_cases("cpu")
    assert {case.precision for case in cases} == {"bf16", "fp32", "fp8"}
    assert left_out["tf32"] == "no GPU"
    jobs, left_out = plan_jobs("cpu", 100.0)
    tried = {(case["engine"], case["zero_stage"]) for job in jobs for case in job.options["cases"]}
    assert tried == {("native", 2), ("native", 3), ("ddp", 0)}
    assert left_out["fsdp2 bf16, stage 3"] == "a CPU tries few cases"


def test_an_engine_that_is_not_installed_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = property(lambda self: "needs the package deepspeed" if self.package else "")
    monkeypatch.setattr(type(CAPABILITIES["ddp"]), "missing_requirement", missing)
    cases, left_out = curves.plan_cases("cuda")
    assert not [case for case in cases if case.engine == "deepspeed"]
    assert left_out == {"deepspeed": "needs the package deepspeed"}


def crash(job: PartJob, num_done: int, status: str = FAILED, *, begun: bool = True) -> Ended:
    """The job as it ends after ``num_done`` cases, in the middle of the next one if it has ``begun``."""
    cases: Sequence[dict[str, Any]] = job.options["cases"]
    rows = [case | {"losses": CURVE, "skipped": [], "seconds": 1.0} for case in cases[:num_done]]
    results = {"rows": rows, "begun": cases[num_done] if begun else None, "planned": cases}
    return ended(job.name, "curves", results, status=status, error="" if status == DONE else "was ended by SIGSEGV")


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


# -- comparison --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", LOSS_BOUNDS)
def test_a_curve_within_its_bound_agrees_and_one_beyond_deviates(precision: str) -> None:
    case, bound = TrainingCase("native", 2, precision), LOSS_BOUNDS[precision]
    near = [4.0, 3.0 * (1 + 0.9 * bound), 2.0]
    assert compare(case, {"losses": near, "skipped": []}, CURVE)["status"] == "agrees"
    far = [4.0, 3.0, 2.0 * (1 - 1.1 * bound)]
    row = compare(case, {"losses": far, "skipped": []}, CURVE)
    assert (row["status"], row["deviation"]) == ("deviates", pytest.approx(1.1 * bound))
    assert row["reason"].endswith("at step 3")


def test_not_a_number_a_skip_and_an_error_are_told_apart() -> None:
    line = json.loads(to_json({"losses": [4.0, float("nan"), 2.0], "skipped": []}))
    row = compare(CASE, line, CURVE)
    assert (row["status"], "nan" in row["reason"], row["reason"][-6:]) == ("deviates", True, "step 2")
    row = compare(CASE, {"losses": CURVE, "skipped": ["step 2: overflow"]}, CURVE)
    assert (row["status"], row["reason"]) == ("deviates", "skipped step 2: overflow")
    row = compare(CASE, {"error": "RuntimeError: no kernel"}, CURVE)
    assert (row["status"], row["deviation"], row["reason"]) == ("failed", None, "RuntimeError: no kernel")


def test_the_engine_follows_its_own_curve_and_the_bound_would_show_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = worker.run_config
    lr = [3e-4]

    def narrow(case: TrainingCase, *, small: bool) -> RunConfig:
        config = full(case, small=small)
        return replace(config, optim=replace(config.optim, lr=lr[0]))

    def train(*cases: TrainingCase) -> list[dict[str, Any]]:
        order = request(tmp_path, device="cpu", cases=[asdict(case) for case in cases])
        begun: list[Any] = []
        for results in worker.run(order):
            begun.append(results["begun"])
        assert begun == [value for case in cases for value in (asdict(case), None)]
        return list(results["rows"])

    monkeypatch.setattr(worker, "run_config", narrow)
    fp32 = TrainingCase("native", 2, "fp32")
    first, low = train(fp32, CASE)
    reference = first["losses"]
    assert len(reference) == curves.STEPS
    assert reference[-1] < 0.9 * reference[0]
    assert compare(CASE, low, reference)["status"] == "agrees"
    assert compare(fp32, low, reference)["status"] == "deviates"  # FP32 that computes in BF16
    lr[0] *= 1.001
    assert compare(fp32, train(fp32)[0], reference)["status"] == "deviates"


def test_a_case_that_fails_costs_no_other_unless_the_device_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: RunConfig, *_: Any) -> dict[str, Any]:
        if config.precision.name == "bf16":
            raise RuntimeError("no kernel\nsecond line")
        return {"losses": CURVE, "skipped": []}

    monkeypatch.setattr(worker, "_train", fail)
    cases = [asdict(CASE), asdict(REFERENCE)]
    *_, results = worker.run(request(tmp_path, device="cpu", cases=cases))
    assert [row.get("error") for row in results["rows"]] == ["RuntimeError: no kernel second line", None]
    *_, late = worker.run(request(tmp_path, seconds=-1.0, device="cpu", cases=cases))
    assert (len(late["rows"]), late["planned"]) == (1, cases)
    monkeypatch.setattr(worker, "_answers", lambda device: False)
    with pytest.raises(worker.AcceptError, match="native bf16, stage 2"):
        list(worker.run(request(tmp_path, device="cpu", cases=cases)))


# -- the page ----------------------------------------------------------------------------------------------------------


def reference(**row: Any) -> Ended:
    line = row or {"losses": CURVE, "skipped": []}
    return ended(REFERENCE_JOB, "curves", {"rows": [asdict(REFERENCE) | line], "begun": None})


@pytest.fixture
def job() -> PartJob:
    cases = [asdict(TrainingCase("ddp", 0, name)) for name in ("bf16", "fp32", "fp8")]
    return PartJob("curves of ddp", "curves", "curves", 1.0, 1.0, {"cases": cases})


def test_curves_are_compared_with_the_reference_wherever_it_ended(job: PartJob) -> None:
    found = report([crash(job, 3, DONE, begun=False), reference()], {"tf32": "no GPU"})
    assert (found.failures, found.left_out) == ([], {"tf32": "no GPU"})
    assert found.conclusions == ["engine=ddp: 3 of 3 cases follow the CPU's FP32 curve: bf16, fp32, fp8; stages 0"]
    text = "\n".join(found.section)
    assert "The CPU's loss falls from 4.0000 to 2.0000." in text
    assert "| ddp    | 0     | 0.0e+00 | 0.0e+00 | 0.0e+00 |" in text
    lost = report([crash(job, 3, DONE, begun=False)], {})
    assert (lost.failures, lost.conclusions) == ([], ["engine=ddp: 0 of 3 cases follow the CPU's FP32 curve"])
    assert "not compared" in "\n".join(lost.section)


def test_a_reference_that_cannot_train_is_a_failure(job: PartJob) -> None:
    found = report([reference(error="RuntimeError: no kernel")], {})
    assert found.failures == ["reference curve: RuntimeError: no kernel"]
    found = report([reference(losses=[4.0, None, 2.0], skipped=[]), crash(job, 1, DONE, begun=False)], {})
    assert found.failures == ["reference curve: not finite"]
    assert "not compared" in "\n".join(found.section)


@pytest.mark.parametrize("status", [FAILED, LATE])
def test_a_crash_is_the_failure_of_the_case_that_had_begun(job: PartJob, status: str) -> None:
    found = report([reference(), crash(job, 1, status)], {})
    assert found.failures == ["ddp fp32, stage 0 failed: was ended by SIGSEGV"]
    assert found.left_out == {"ddp fp8, stage 0": "no time left, or its process failed before"}
    again = replace(job, name="curves of ddp, start 2", options={"cases": job.options["cases"][2:]})
    assert report([reference(), crash(job, 1, status), crash(again, 1, DONE, begun=False)], {}).left_out == {}
    whole = report([ended(job.name, "curves", {}, status=status, error="ImportError: libx.so")], {})
    assert whole.failures == [f"curves of ddp {status}: ImportError: libx.so"]


def test_a_case_that_was_cut_short_is_left_out_and_no_failure(job: PartJob) -> None:
    found = report([reference(), crash(job, 1, CUT)], {})
    assert found.failures == []
    assert list(found.left_out) == ["ddp fp32, stage 0", "ddp fp8, stage 0"]


def test_a_case_that_its_process_does_not_support_is_left_out_with_the_reason(job: PartJob) -> None:
    found = crash(job, 1, DONE, begun=False)
    found.results["rows"] = [job.options["cases"][0] | {"unsupported": "no BF16"}, found.results["rows"][0]]
    found.results["rows"][1] |= {"precision": "fp32", "losses": [4.0, None, 2.0]}
    result = report([reference(), found], {})
    assert result.left_out["ddp bf16, stage 0"] == "no BF16"
    assert [line.split(":")[0] for line in result.failures] == ["ddp fp32, stage 0 deviates"]
    assert "| not finite |" in "\n".join(result.section)
