"""Part a: which cases a machine has, their comparison with the CPU's curve, and engines whose process crashes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.config.capabilities import CAPABILITIES
from dtrain.config.schema import RunConfig
from dtrain.tools.accept.part import PartRequest, load_partial
from dtrain.tools.accept.parts import training, training_worker
from dtrain.tools.accept.parts.training import LOSS_BOUNDS, compare, plan_cases, section
from dtrain.tools.accept.parts.training_worker import STEPS, TrainingCase, TrainingJob
from dtrain.tools.accept.processes import Ended

CASE = TrainingCase("native", 2, "bf16")
CURVE = [4.0, 3.0, 2.0]


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(CAPABILITIES["ddp"]), "missing_requirement", "")


# -- cases -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("all_installed")
def test_a_gpu_has_every_engine_precision_and_stage_that_the_table_of_capabilities_has() -> None:
    cases, left_out = plan_cases("cuda")
    by_engine = {engine: [case for case in cases if case.engine == engine] for engine in CAPABILITIES}
    assert {engine: len(own) for engine, own in by_engine.items()} == {
        "native": 20, "fsdp2": 10, "deepspeed": 16, "ddp": 5,
    }  # fmt: skip
    assert len(set(cases)) == len(cases)
    assert list(left_out) == ["deepspeed fp8"]
    assert "without scales" in left_out["deepspeed fp8"]
    assert cases[0] == CASE


@pytest.mark.usefixtures("all_installed")
def test_a_cpu_leaves_out_what_it_has_no_arithmetic_for() -> None:
    cases, left_out = plan_cases("cpu")
    assert {case.precision for case in cases} == {"bf16", "fp32", "fp8"}
    assert left_out["tf32"] == "no GPU"


def test_an_engine_that_is_not_installed_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = property(lambda self: "needs the package deepspeed" if self.package else "")
    monkeypatch.setattr(type(CAPABILITIES["ddp"]), "missing_requirement", missing)
    cases, left_out = plan_cases("cuda")
    assert not [case for case in cases if case.engine == "deepspeed"]
    assert left_out == {"deepspeed": "needs the package deepspeed"}


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
    row = compare(CASE, {"losses": [4.0, math.nan, 2.0], "skipped": []}, CURVE)
    assert (row["status"], "nan" in row["reason"]) == ("deviates", True)
    row = compare(CASE, {"losses": CURVE, "skipped": ["step 2: overflow"]}, CURVE)
    assert (row["status"], row["reason"]) == ("deviates", "skipped step 2: overflow")
    row = compare(CASE, {"error": "RuntimeError: no kernel"}, CURVE)
    assert (row["status"], row["deviation"], row["reason"]) == ("failed", None, "RuntimeError: no kernel")


def test_the_engine_follows_its_own_curve_and_the_bound_would_show_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = training_worker.run_config
    lr = [3e-4]

    def narrow(case: TrainingCase, *, small: bool) -> RunConfig:
        config = full(case, small=small)
        model = replace(config.model, num_layers=2, hidden_dim=128)
        return replace(config, model=model, optim=replace(config.optim, lr=lr[0]))

    monkeypatch.setattr(training_worker, "run_config", narrow)

    def train(case: TrainingCase) -> dict[str, Any]:
        return training_worker._attempt(case, torch.device("cpu"), {}, small=True)

    fp32 = TrainingCase("native", 2, "fp32")
    reference, low = train(fp32)["losses"], train(CASE)
    assert len(reference) == STEPS
    assert reference[-1] < 0.9 * reference[0]
    assert compare(CASE, low, reference)["status"] == "agrees"
    assert compare(fp32, low, reference)["status"] == "deviates"  # FP32 that computes in BF16
    lr[0] *= 1.001
    assert compare(fp32, train(fp32), reference)["status"] == "deviates"


# -- processes of the engines ------------------------------------------------------------------------------------------


class Engines:
    """Stands for ``run_process``: trains along the curve, and crashes or hangs in the cases that it is given."""

    def __init__(self, crashes: dict[TrainingCase, Ended]) -> None:
        self.crashes = crashes
        self.jobs: list[TrainingJob] = []

    def run(self, module: str, job: str, *, limit_s: float, threads: int, log: Path) -> Ended:
        work = TrainingJob(**json.loads(job))
        self.jobs.append(work)
        with Path(work.output).open("w") as output:
            for values in work.cases:
                output.write(json.dumps({"begin": values}) + "\n")
                if (ended := self.crashes.get(TrainingCase(**values))) is not None:
                    output.write('{"engine": "nat')  # killed while it wrote
                    return ended
                output.write(json.dumps(values | {"losses": CURVE, "skipped": [], "seconds": 1.0}) + "\n")
        return Ended("", 1.0)


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, engines: Engines, seconds: float = 1000.0) -> dict[str, Any]:
    monkeypatch.setattr(training, "run_process", engines.run)
    monkeypatch.setattr(training, "find_tests", lambda: (None, "no tests here"))
    folder.mkdir(exist_ok=True)
    return training.run(PartRequest("cuda", seconds, False, str(folder)))


@pytest.mark.usefixtures("all_installed")
def test_every_case_agrees_with_one_process_for_each_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines({})
    results = run(tmp_path, monkeypatch, engines)
    assert [job.device for job in engines.jobs] == ["cpu", *["cuda"] * 4]
    assert len(results["cases"]) == 51
    assert results["failures"] == []
    first = results["conclusions"][0]
    where = "bf16, fp32, fp8, fp16, tf32; stages 0, 1, 2, 3"
    assert first == f"engine=native: 20 of 20 cases follow the CPU's FP32 curve: {where}"
    assert results["left_out"]["tests/gpu"] == "no tests here"
    text = "\n".join(section(results))
    assert "The CPU's loss falls from 4.0000 to 2.0000." in text
    assert "| ddp       | 0     | 0.0e+00 " in text


@pytest.mark.usefixtures("all_installed")
def test_after_a_crash_the_other_cases_of_the_engine_run_in_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes = {
        TrainingCase("native", 2, "fp8"): Ended("", 1.0, "was ended by SIGSEGV: no output"),
        TrainingCase("ddp", 0, "bf16"): Ended("", 1.0, "not finished after 9 s, so it was killed", True),
    }
    engines = Engines(crashes)
    results = run(tmp_path, monkeypatch, engines)
    assert len(results["cases"]) == 51
    assert results["failures"] == [
        "native fp8, stage 2 failed: was ended by SIGSEGV: no output",
        "ddp bf16, stage 0 failed: not finished after 9 s, so it was killed",
    ]
    assert len(engines.jobs) == 1 + 4 + 2
    assert "19 of 20 cases" in results["conclusions"][0]


@pytest.mark.usefixtures("all_installed")
def test_an_engine_whose_process_does_not_start_fails_and_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Engines):
        def run(self, module: str, job: str, **options: Any) -> Ended:
            if TrainingJob(**json.loads(job)).cases[0]["engine"] == "ddp":
                return Ended("", 1.0, "ended with exit code 1: ImportError: libx.so")
            return super().run(module, job, **options)

    results = run(tmp_path, monkeypatch, Broken({}))
    assert results["failures"] == [
        f"ddp {name}, stage 0 failed: its process ended with exit code 1: ImportError: libx.so"
        for name in ("bf16", "fp32", "fp8")
    ]
    assert results["left_out"]["ddp tf32, stage 0"] == "its process failed 3 times"


@pytest.mark.usefixtures("all_installed")
def test_a_part_that_starts_again_repeats_only_what_did_not_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, monkeypatch, Engines({TrainingCase("native", 2, "fp8"): Ended("", 1.0, "was ended by SIGSEGV")}))
    assert len(load_partial(PartRequest("cuda", 1.0, False, str(tmp_path)))["cases"]) == 51
    engines = Engines({})
    results = run(tmp_path, monkeypatch, engines)
    assert [job.cases for job in engines.jobs] == [[asdict(TrainingCase("native", 2, "fp8"))]]
    assert (len(results["cases"]), results["failures"]) == (51, [])


@pytest.mark.usefixtures("all_installed")
def test_engines_without_time_are_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run(tmp_path, monkeypatch, Engines({}), seconds=20.0)
    assert "deepspeed" not in {row["engine"] for row in results["cases"]}
    assert results["left_out"]["deepspeed bf16, stage 2"].startswith("no time left: ")


@pytest.mark.parametrize("results", [{}, {"reference": None, "cases": [], "tests": None, "left_out": {}}])
def test_the_section_of_no_results(results: dict[str, Any]) -> None:
    assert "Bounds: bf16 0.005" in "\n".join(section(results))
