"""The plan of an acceptance: the parts of its page, and the jobs of each goal in order of value. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtrain.distributed.startup.launch_env import num_cores
from dtrain.measure.accept import curves, steps
from dtrain.measure.accept.job import PartJob
from dtrain.measure.accept.parts import gpu_tests

FACTS, FIGURES, ALL = "facts", "figures", "all"
LIMITS_S = {FACTS: 340.0, FIGURES: 280.0, ALL: 1500.0}
"""Time of a goal if ``limit_s`` is null."""

PARTS = {
    "environment": "First uses",
    "casts": "Bits of the FP8 casts",
    "curves": "Training against the CPU's FP32 curve",
    "tests": "Tests of `tests/gpu`",
    "compiled": "Compiled blocks, two layers of 1.2B",
    "streams": "Tests that measure time, alone",
    "optimizer": "Optimizer phase",
    "rates": "Matrix rates and copy bandwidth",
    "steps": "Training steps",
    "profile": "Profile of a training step",
    "memory": "Model states and the loss head",
}
"""Title by key, in the order of the page."""

_SMALL_GIB = 32.0  # less does not hold a 1.2B model with its optimizer states in all engines
_FACTS_SHARE, _ALONE_S = 0.3, 110.0
_COMPILE_S = 75.0  # for the compilers, side by side, if there are no caches
_TEST_WORKERS = 9


@dataclass(frozen=True)
class Machine:
    """The machine that a plan is made for; ``gib`` is the memory of its GPU, 0 on a CPU."""

    device: str
    gib: float = 0.0

    @property
    def small(self) -> bool:
        return self.gib < _SMALL_GIB


@dataclass(frozen=True)
class Plan:
    """Jobs: some side by side, then each alone.

    Attributes:
        together_s: time of the first, from the start of the command.
        left_out: name of each case that cannot run here, with the reason.
    """

    together: list[PartJob] = field(default_factory=list)
    together_s: float = 0.0
    alone: list[PartJob] = field(default_factory=list)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def jobs(self) -> list[PartJob]:
        return [*self.together, *self.alone]


def make_plan(
    goal: str,
    machine: Machine,
    limit_s: float,
    *,
    parts: Sequence[str] | None = None,
    has_caches: bool = False,
    keep_trace: str | None = None,
) -> Plan:
    """Returns the jobs of a goal.

    Args:
        goal: a key of :data:`LIMITS_S`.
        machine: where they run.
        limit_s: time of the command.
        parts: keys of :data:`PARTS`; None: all.
        has_caches: whether the compilers' caches are filled.
        keep_trace: folder for raw traces of profiles; None: they are not kept.
    """
    plans = []
    if goal in (FACTS, ALL):
        plans.append(_facts(machine, limit_s if goal == FACTS else min(LIMITS_S[FACTS], _FACTS_SHARE * limit_s)))
    if goal in (FIGURES, ALL):
        plans.append(_figures(machine, keep_trace, compiles=goal == FIGURES and not has_caches))
    chosen = set(PARTS if parts is None else parts)
    return Plan(
        _unique([job for plan in plans for job in plan.together], chosen),
        max(plan.together_s for plan in plans),
        _unique([job for plan in plans for job in plan.alone], chosen),
        {part: found for plan in plans for part, found in plan.left_out.items() if part in chosen},
    )


def _unique(jobs: Sequence[PartJob], parts: Collection[str]) -> list[PartJob]:
    """Returns the jobs of ``parts``; of a job in both goals the first place counts."""
    found: dict[str, PartJob] = {}
    for job in jobs:
        if job.part in parts:
            found.setdefault(job.name, job)
    return list(found.values())


def _facts(machine: Machine, limit_s: float) -> Plan:
    device = machine.device
    on_cpu = device == "cpu"
    together_s = limit_s - (0.35 * limit_s if on_cpu else min(_ALONE_S, limit_s / 3))
    jobs, left_out = curves.plan_jobs(device, max(20.0, together_s - 20.0))
    workers = max(1, min(_TEST_WORKERS, num_cores() - 4)) if not on_cpu else 1
    alone = list(gpu_tests.ALONE)
    not_alone = "not test_what_is_timed"
    options: dict[str, Any] = {"files": list(gpu_tests.FILES), "workers": workers, "select": [not_alone]}
    if on_cpu:
        options["select"].append(gpu_tests.QUICK)
    together = [
        PartJob("environment", "environment", "environment", 60.0, 150.0),
        PartJob("tests", "tests", "gpu_tests", together_s, 1e9, options),
        *jobs,
        PartJob("casts", "casts", "casts", 60.0, 150.0),
        *_graph_jobs(machine),
    ]
    timed = {"files": alone, "workers": 1}
    if on_cpu:
        timed |= {"files": alone[:1], "select": ["dtype or gloo"]}
    last = [
        PartJob("tests that measure time", "streams", "gpu_tests", 40.0, 60.0, timed),
        _part("optimizer", 30.0),
        _part("rates", 22.0),
    ]
    return Plan(together, together_s, last, {"curves": left_out})


def _figures(machine: Machine, keep_trace: str | None, *, compiles: bool) -> Plan:
    on_cpu = machine.device == "cpu"
    profiles = [_profile("bf16", machine, keep_trace, is_chunked=True), _profile("fp8", machine, keep_trace)]
    # after the run of this number: they say what to do next
    after = {5: [profiles[0], _memory("loss head", "head")], 11: [] if on_cpu else [profiles[1]]}
    alone = [_part("optimizer", 12.0 if on_cpu else 25.0), _part("rates", 5.0 if on_cpu else 20.0)]
    left_out: dict[str, str] = {}
    order = steps.SMALL_ORDER if machine.small else steps.ORDER
    for number, (model, name, run) in enumerate(order):
        if reason := steps.missing_package(name):
            left_out[f"{model}, {name}"] = reason
            continue
        size = steps.size_of(model, name, machine.gib)
        alone.append(steps.step_job(model, name, run, device=machine.device, threads=num_cores(), size=size))
        alone += after.get(number, [])
    alone += [_memory("states", "states"), *([] if on_cpu else [_profile("bf16", machine, keep_trace)])]
    together = _graph_jobs(machine) if compiles else []
    return Plan(together, _COMPILE_S if together else 0.0, alone, {"steps": left_out})


def _graph_jobs(machine: Machine) -> list[PartJob]:
    """Returns jobs that compile the blocks of 1.2B, two layers of it: a fact, and a filled cache."""
    if machine.device == "cpu":
        return []  # a compiler of C++ takes a minute for each
    model = "tiny" if machine.small else "1.2B"
    options: dict[str, Any] = {"device": machine.device, "threads": 1, "layers": 2}
    return [
        steps.step_job(model, name, 0, size=steps.size_of(model, name, machine.gib), **options) for name in steps.GRAPHS
    ]


def _part(name: str, seconds: float) -> PartJob:
    return PartJob(name, name, name, seconds, seconds + 30.0, threads=num_cores())


def _memory(name: str, what: str) -> PartJob:
    return PartJob(name, "memory", "memory", 20.0, 40.0, {"what": what})


def _profile(precision: str, machine: Machine, keep_trace: str | None, *, is_chunked: bool = False) -> PartJob:
    compiled = machine.device != "cpu"
    case = {"precision": precision, "is_compiled": compiled, "is_chunked": is_chunked}
    name = f"profile of {precision}{', chunked loss' if is_chunked else ''}"
    model = "tiny" if machine.small else "1.2B"
    size = steps.size_of(model, steps.CHUNKED if is_chunked else steps.DTRAIN, machine.gib)
    options: dict[str, Any] = {"case": case, "micro_batch": size}
    if keep_trace is not None:
        options["keep_trace"] = f"{keep_trace}/{name.replace(' ', '-').replace(',', '')}.json"
    return PartJob(name, "profile", "profile", 40.0, 60.0, options, num_cores())
