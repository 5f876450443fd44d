"""What each goal does, in which order, and how it adapts to the machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from dtrain.cli.resolve import read_suite
from dtrain.config.capabilities import CAPABILITIES
from dtrain.config.commands import PARITY, SUITES
from dtrain.config.tool_schema import ProfileSuite
from dtrain.measure.accept import table
from dtrain.measure.accept.job import PartJob
from dtrain.measure.accept.table import LIMITS_S, PARTS, ROWS, Machine, Plan, make_plan
from tests.helpers.launch import ROOT

H100, CPU = Machine("cuda", 79.6), Machine("cpu")


@pytest.fixture(autouse=True)
def _all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(CAPABILITIES["ddp"]), "missing_requirement", "")


def names(jobs: Sequence[PartJob]) -> list[str]:
    return [job.name for job in jobs]


def plan(goal: str, machine: Machine = H100, **options: object) -> Plan:
    return make_plan(goal, machine, LIMITS_S[goal], **options)  # type: ignore[arg-type]


def test_facts_ask_side_by_side_what_works_and_time_alone_what_measures_the_host() -> None:
    found = plan("facts")
    assert names(found.together)[:3] == ["first uses", "tests", "curves of native"]
    assert {f"curves of {engine}" for engine in CAPABILITIES} < set(names(found.together))
    assert names(found.alone) == ["tests that measure time", "optimizer", "products"]
    assert found.together_s == LIMITS_S["facts"] - 110
    by_name = {job.name: job for job in found.jobs}
    assert not [word for word in by_name["tests"].words(Path()) if "test_streams" in word]
    assert {job.limit_s for job in found.together if job.part == "curves"} == {found.together_s}


def test_figures_begin_with_the_optimizer_and_compile_side_by_side_without_caches() -> None:
    found = plan("figures")
    assert names(found.alone)[:3] == ["optimizer", "products", "1.2B"]
    assert names(found.together) == [name for name in names(plan("facts").together) if name.startswith("compiled")]
    assert (plan("figures", has_caches=True).together, plan("figures", has_caches=True).together_s) == ([], 0.0)


def test_all_is_both_and_measures_nothing_twice() -> None:
    both, facts, figures = plan("all"), plan("facts"), plan("figures")
    assert set(names(both.jobs)) == {*names(facts.jobs), *names(figures.jobs)}
    assert len(set(names(both.jobs))) == len(both.jobs)
    assert {job.part for job in both.jobs} == set(PARTS)
    assert {job.part for job in plan("all", parts=["rates"]).jobs} == {"rates"}
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_a_small_gpu_and_a_cpu_train_tiny_models() -> None:
    for machine in (Machine("cuda", 24.0), CPU):
        words = {word for job in plan("all", machine).jobs for word in job.words(Path())}
        assert "model=tiny" in words
        assert not [word for word in words if word.startswith("model=llama")]
    left_out = plan("all", CPU).left_out
    assert (left_out["casts"], left_out["curves of fsdp2"]) == ("no GPU", "no GPU")
    assert not {job.part for job in plan("all", CPU).jobs} & {"compiled", "casts"}


def test_what_is_missing_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = property(lambda self: "needs the package deepspeed" if self.package else "")
    monkeypatch.setattr(type(CAPABILITIES["ddp"]), "missing_requirement", missing)
    assert plan("facts").left_out == {"curves of deepspeed": "needs the package deepspeed"}
    monkeypatch.setattr(table, "_root", lambda: Path("/nowhere"))
    left_out = plan("facts").left_out
    assert left_out["tests"] == left_out["tests that measure time"]
    assert left_out["tests"].startswith("this is an installed package")


def test_blocks_of_128_run_where_the_gpu_multiplies_them() -> None:
    blockwise = {"compiled, FP8 blockwise", "1.2B, blockwise"}
    for name in ("NVIDIA H100 80GB HBM3", "one of tomorrow"):
        assert blockwise <= set(names(plan("all", Machine("cuda", 79.6, name)).jobs))
    left_out = plan("all", Machine("cuda", 79.6, "NVIDIA A100-SXM4-80GB")).left_out
    assert left_out == dict.fromkeys(blockwise, "FP8 products of blocks need compute capability 9.0")


def test_every_test_for_a_gpu_is_named_by_a_row() -> None:
    words = [word for job in plan("facts").jobs for word in job.words(Path()) if "/tests/gpu/" in word]
    files = {Path(word.split("::")[0]) for word in words}
    assert files == set((ROOT / "tests/gpu").glob("test_*.py"))
    for word in words:
        path, _, name = word.partition("::")
        assert re.search(rf"^def {name}\(", Path(path).read_text(encoding="utf-8"), re.MULTILINE) or not name, word


@pytest.mark.parametrize("machine", [H100, Machine("cuda", 24.0), CPU])
def test_every_command_has_a_valid_configuration(machine: Machine) -> None:
    """No machine of the tests has a GPU, so nothing else reads those commands."""
    found = []
    for job in plan("all", machine, traces="traces").jobs:
        words = job.words(Path("out"))
        if words[:2] == ["dtrain", "bench"]:
            found.append(read_suite(words[3:], SUITES[words[2]].primary))
        elif words[:2] == ["dtrain", "parity"]:
            found.append(read_suite(words[2:], PARITY))
    assert len(found) >= 12
    profiles = [config.bench.keep_trace for config in found if isinstance(config, ProfileSuite)]
    assert len(set(profiles)) == len(profiles) > 1, "a trace does not replace another one"


def test_the_command_of_a_job_is_one_that_a_user_types() -> None:
    job = PartJob("a", "rates", "dtrain bench products bench.squares=[4,8] bench.out={out}", 1.0)
    assert job.shown == "dtrain bench products 'bench.squares=[4,8]'"
    assert job.words(Path("/r/a.json"))[-1] == "bench.out=/r/a.json"
    job = PartJob("a", "tests", "DTRAIN_RECORDS={out} ON_CPU=1 pytest -k 'a or b'", 1.0)
    assert job.shown == "ON_CPU=1 python -m pytest -k 'a or b'"
    job = PartJob("a", "curves", "dtrain parity run_dir={folder}", 1.0, "/report.json")
    assert (job.shown, job.words(Path("/r/a/report.json"))[-1]) == ("dtrain parity", "run_dir=/r/a")
