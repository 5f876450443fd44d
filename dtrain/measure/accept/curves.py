"""The curves of all engines beside the CPU's: which cases there are, their comparison, and the lines of the page.

Every engine, precision and stage trains the default model on one rank. The CPU's curve is the native engine's in FP32
on the same machine. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dtrain.config.capabilities import CAPABILITIES, SETTINGS, check
from dtrain.errors import ConfigError
from dtrain.measure.accept.job import CUT, Ended, PartJob
from dtrain.measure.accept.report import PartReport
from dtrain.measure.parity.compare import BOUNDS
from dtrain.tools.tables import Table

STEPS = 20
LOSS_BOUNDS = {name: bounds.loss for name, bounds in BOUNDS.items()} | {"fp32": 5e-5}
"""Largest ``|loss - CPU's| / CPU's`` of any step: the bounds of ``dtrain parity``, but more in FP32, because a GPU sums
in another order than a CPU."""

REFERENCE_JOB = "reference curve"
_PRECISIONS = ("bf16", "fp32", "fp8", "fp16", "tf32")
_STAGES = (2, 3, 0, 1)  # in order of value, as the precisions
_STARTS = 3  # of one engine's processes, after which its other cases are left out


@dataclass(frozen=True)
class TrainingCase:
    """One engine in one precision at one stage."""

    engine: str
    zero_stage: int
    precision: str

    @property
    def name(self) -> str:
        return f"{self.engine} {self.precision}, stage {self.zero_stage}"


REFERENCE = TrainingCase("native", 2, "fp32")


def plan_cases(device: str) -> tuple[list[TrainingCase], dict[str, str]]:
    """Returns the cases of all engines that this machine supports, and the others by name with the reason."""
    cases, left_out = [], {}
    for engine, capabilities in CAPABILITIES.items():
        if missing := capabilities.missing_requirement:
            left_out[engine] = missing
            continue
        # the first stage in all precisions, then the others: a bug shows in the precision first
        for stage in sorted(capabilities.values("zero_stage"), key=_STAGES.index):
            for precision in _PRECISIONS:
                case = TrainingCase(engine, stage, precision)
                try:
                    check(engine, zero_stage=stage, precision=precision, device_type=device)
                except ConfigError as error:
                    left_out[f"{engine} {precision}"] = str(error)
                    continue
                if device == "cpu" and precision in ("fp16", "tf32"):
                    left_out[precision] = "no GPU" if precision == "tf32" else "takes minutes on a CPU"
                    continue
                cases.append(case)
    assert set(_PRECISIONS) | {"auto"} == set(SETTINGS["precision"])
    return cases, left_out


def plan_jobs(device: str, seconds: float) -> tuple[list[PartJob], dict[str, str]]:
    """Returns the reference on the CPU and a job for each engine, which has ``seconds``; and the cases left out."""
    cases, left_out = plan_cases(device)
    if device == "cpu":  # a dry run: an engine of each kind of step, without the compiler that DeepSpeed needs there
        kept = {("native", 2), ("native", 3), ("ddp", 0)}
        left_out |= {case.name: "a CPU tries few cases" for case in cases if (case.engine, case.zero_stage) not in kept}
        cases = [case for case in cases if (case.engine, case.zero_stage) in kept]
    jobs = [_job(REFERENCE_JOB, [REFERENCE], "cpu", min(seconds, 120.0))]
    jobs[0] = replace(jobs[0], threads=1 if device == "cpu" else 4, again=None)
    for engine in dict.fromkeys(case.engine for case in cases):
        own = [case for case in cases if case.engine == engine]
        jobs.append(_job(f"curves of {engine}", own, device, seconds))
    return jobs, left_out


def _job(name: str, cases: Sequence[TrainingCase], device: str, seconds: float) -> PartJob:
    options = {"device": device, "cases": [asdict(case) for case in cases]}
    return PartJob(name, "curves", "curves", seconds, seconds + 60.0, options, again=_rest)


def _rest(job: PartJob, ended: Ended) -> PartJob | None:
    """Returns the job for the cases that a crash has left; each start has a number in its name."""
    begun, rows = ended.results.get("begun"), ended.results.get("rows", [])
    left = job.options["cases"][len(rows) + (begun is not None) :]
    base, _, number = job.name.partition(", start ")
    start = int(number or 1) + 1
    if not left or start > _STARTS or not (begun or rows):
        return None
    return replace(job, name=f"{base}, start {start}", options={**job.options, "cases": left})


def compare(case: TrainingCase, line: Mapping[str, Any], reference: Sequence[float]) -> dict[str, Any]:
    """Returns the row of a case: its result against ``reference``, the losses of the CPU in FP32."""
    bound = LOSS_BOUNDS[case.precision]
    row = asdict(case) | {"bound": bound, "losses": line.get("losses")}
    if "losses" not in line:
        return row | {"status": "failed", "deviation": None, "reason": str(line.get("error"))}
    if not reference:
        return row | {"status": "not compared", "deviation": None, "reason": "the CPU's curve is missing"}
    # a number that is not finite has become None
    deviations = [
        float("nan") if loss is None else abs(loss - other) / abs(other)
        for loss, other in zip(line["losses"], reference, strict=True)
    ]
    # not `max`, which passes over NaN
    worst = next((value for value in deviations if value != value), max(deviations))
    reason = ""
    if line["skipped"]:
        reason = f"skipped {line['skipped'][0]}"
    elif not worst <= bound:
        step = next(number for number, value in enumerate(deviations, 1) if not value <= bound)
        reason = f"the loss is off by {worst:.2g}, first beyond {bound:g} at step {step}"
    return row | {"status": "deviates" if reason else "agrees", "deviation": worst, "reason": reason}


def report(ended: Sequence[Ended], left_out: Mapping[str, str]) -> PartReport:
    """Compares the curves of all jobs that have ended."""
    losses = next((found.results["rows"][0].get("losses") or [] for found in ended if _is_reference(found)), [])
    reference = [] if None in losses else losses
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    missing = dict(left_out)
    for found in ended:
        if found.name == REFERENCE_JOB:
            for line in found.results.get("rows", []):
                if error := line.get("error") or line.get("unsupported") or (losses and not reference and "not finite"):
                    failures.append(f"{found.name}: {error}")
            continue
        for line in found.results.get("rows", []):
            case = TrainingCase(line["engine"], line["zero_stage"], line["precision"])
            if "unsupported" in line:
                missing[case.name] = line["unsupported"]
            else:
                rows.append(compare(case, line, reference))
        begun = found.results.get("begun")
        if found.error and found.status != CUT and begun:
            rows.append(compare(TrainingCase(**begun), {"error": found.error}, reference))
    known = {_name(row) for row in rows} | set(missing)
    planned = [TrainingCase(**values).name for found in ended for values in found.results.get("planned", [])]
    missing |= {name: "no time left, or its process failed before" for name in planned if name not in known}
    wrong = [row for row in rows if row["status"] in ("failed", "deviates")]
    failures += [f"{_name(row)} {row['status']}: {row['reason']}" for row in wrong]
    # a job that ended with a case under way is that case's failure; one without results failed as a whole
    failures += [line for found in ended if not found.results.get("begun") for line in found.failures]
    return PartReport(_conclusions(rows), failures, missing, _section(rows, reference))


def _is_reference(ended: Ended) -> bool:
    return ended.name == REFERENCE_JOB and bool(ended.results.get("rows"))


def _conclusions(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for engine in dict.fromkeys(row["engine"] for row in rows):
        own = [row for row in rows if row["engine"] == engine]
        good = [row for row in own if row["status"] == "agrees"]
        precisions = ", ".join(name for name in _PRECISIONS if any(row["precision"] == name for row in good))
        stages = ", ".join(map(str, sorted({row["zero_stage"] for row in good})))
        where = f": {precisions}; stages {stages}" if good else ""
        lines.append(f"engine={engine}: {len(good)} of {len(own)} cases follow the CPU's FP32 curve{where}")
    return lines


def _section(rows: Sequence[Mapping[str, Any]], reference: Sequence[float]) -> list[str]:
    bounds = ", ".join(f"{name} {LOSS_BOUNDS[name]:g}" for name in _PRECISIONS)
    lines = [
        f"The default model, {STEPS} steps on one rank, AdamW. Largest `|loss - CPU's| / CPU's` of any step; the CPU's "
        f"losses are the native engine's in FP32 on this machine. Bounds: {bounds}. FP16 has a constant loss scale.",
    ]
    if reference:
        lines += ["", f"The CPU's loss falls from {reference[0]:.4f} to {reference[-1]:.4f}."]
    if rows:
        by_case = {(row["engine"], row["zero_stage"], row["precision"]): row for row in rows}
        precisions = [name for name in _PRECISIONS if any(row["precision"] == name for row in rows)]
        cells = [
            (engine, str(stage), *(_cell(by_case.get((engine, stage, name))) for name in precisions))
            for engine, stage in dict.fromkeys((row["engine"], row["zero_stage"]) for row in rows)
        ]
        lines += ["", Table("Curves", ("engine", "stage", *precisions), cells).markdown()]
    return lines


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["deviation"] is None:
        return str(row["status"])
    if row["deviation"] != row["deviation"]:
        return "not finite"
    return f"{row['deviation']:.1e}" + ("" if row["status"] == "agrees" else " deviates")


def _name(row: Mapping[str, Any]) -> str:
    return TrainingCase(row["engine"], row["zero_stage"], row["precision"]).name
