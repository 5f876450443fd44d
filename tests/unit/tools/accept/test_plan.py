"""What each goal does, in which order, and how it adapts to the machine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dtrain.config.capabilities import CAPABILITIES
from dtrain.tools.accept.job import PartJob
from dtrain.tools.accept.plan import LIMITS_S, PARTS, Machine, Plan, make_plan

H100, CPU = Machine("cuda", 79.6), Machine("cpu")


@pytest.fixture(autouse=True)
def _all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(CAPABILITIES["ddp"]), "missing_requirement", "")
    monkeypatch.setattr("dtrain.tools.bench.peers.find_spec", lambda name: object())


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


def test_all_is_both_and_measures_nothing_twice() -> None:
    both, facts, figures = plan("all"), plan("facts"), plan("figures")
    assert set(names(both.jobs)) == {*names(facts.jobs), *names(figures.jobs)}
    assert len(set(names(both.jobs))) == len(both.jobs)
    assert names(both.alone)[:4] == [*names(facts.alone), "1.2B, dtrain, run 1"]
    assert both.together_s < LIMITS_S["facts"]


def test_every_part_has_jobs_and_can_be_chosen_alone() -> None:
    parts = {job.part for job in plan("all").jobs}
    assert parts == set(PARTS)
    for part in PARTS:
        assert {job.part for job in plan("all", parts=[part]).jobs} == {part}


def test_a_library_that_is_not_installed_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.tools.bench.peers.find_spec", lambda name: None)
    found = plan("figures")
    assert not [name for name in names(found.alone) if "DeepSpeed" in name]
    assert found.left_out["steps"]["1.2B, DeepSpeed"] == "package deepspeed is not installed"


def test_a_small_gpu_and_a_cpu_train_tiny_models() -> None:
    for machine in (Machine("cuda", 24.0), CPU):
        found = plan("all", machine)
        assert {name.split(",")[0] for name in names(found.jobs) if ", run " in name} == {"tiny"}
    compiled = [job.options["job"]["is_compiled"] for job in plan("all", CPU).jobs if job.part == "steps"]
    assert not any(compiled)
    assert not [job for job in plan("all", CPU).jobs if job.part == "compiled"]


def test_traces_are_kept_where_they_are_asked_for() -> None:
    kept = [job.options.get("keep_trace") for job in plan("figures", keep_trace="t").alone if job.part == "profile"]
    assert kept == ["t/profile-of-bf16-chunked-loss.json", "t/profile-of-fp8.json", "t/profile-of-bf16.json"]
    assert len({job.file_name for job in plan("all").jobs}) == len(plan("all").jobs)
