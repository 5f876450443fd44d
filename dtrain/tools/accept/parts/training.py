"""Part a: every engine, precision and stage trains along the CPU's FP32 curve; then the tests of ``tests/gpu``.

The model is the default one. The curve is the native engine's in FP32 on the CPU of the same machine. Each engine has
one process, which is restarted after a crash.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtrain.config.capabilities import CAPABILITIES, SETTINGS, check
from dtrain.distributed.launch_env import num_cores
from dtrain.errors import ConfigError, DtrainError
from dtrain.tools.accept.part import PartRequest, load_partial, save_partial
from dtrain.tools.accept.parts.gpu_tests import find_tests, run_gpu_tests
from dtrain.tools.accept.parts.training_worker import STEPS, TrainingCase, TrainingJob
from dtrain.tools.accept.processes import Ended, run_process
from dtrain.tools.parity.compare import BOUNDS
from dtrain.tools.tables import Table

LOSS_BOUNDS = {name: bounds.loss for name, bounds in BOUNDS.items()} | {"fp32": 5e-5}
"""Largest ``|loss - CPU's| / CPU's`` of any step: the bounds of ``dtrain parity``, but more in FP32, because a GPU sums
in another order than a CPU."""

_WORKER = "dtrain.tools.accept.parts.training_worker"
_REFERENCE = TrainingCase("native", 2, "fp32")
_PRECISIONS = ("bf16", "fp32", "fp8", "fp16", "tf32")
_STAGES = (2, 3, 0, 1)  # in order of value, as the precisions
_TESTS_SHARE = {"cuda": 0.5, "cpu": 0.2}  # of the part's time, for tests/gpu; a CPU skips them all
_START_S = {"cuda": 15.0, "cpu": 5.0}  # of an engine's process
_DEEPSPEED_START_S = {"cuda": 25.0, "cpu": 60.0}  # on a CPU it compiles its optimizer
_GRACE_S = {"cuda": 45.0, "cpu": 20.0}  # of the case under way, in which a compiler may start
_START_CASES, _DEEPSPEED_START_CASES = 5, 20  # a start takes as long as this many cases
_MOST_THREADS = 4  # the model is small
_REFERENCE_S = 120.0
_CRASHES = 3  # of one engine's processes, after which its other cases are left out


def run(request: PartRequest) -> dict[str, Any]:
    begin = time.monotonic()
    deadline = begin + request.seconds
    root, reason = find_tests()
    tests_s = request.seconds * _TESTS_SHARE[request.device] if root is not None else 0.0
    results = load_partial(request) or {"reference": None, "cases": [], "tests": None, "left_out": {}}
    results["cases"] = [row for row in results["cases"] if row["status"] == "agrees"]
    results["left_out"] = {}
    if results["reference"] is None:
        results["reference"] = _train_reference(request)
        save_partial(request, results)
    _train_engines(request, deadline - tests_s, results)
    if root is None:
        results["left_out"]["tests/gpu"] = reason
    else:

        def save(tests: dict[str, Any]) -> None:
            results["tests"] = tests
            save_partial(request, results)

        results["tests"] = run_gpu_tests(root, request.device, deadline, Path(request.directory), save)
        results["left_out"] |= results["tests"]["unfinished"]
    return results | {"failures": failures(results), "conclusions": conclusions(results)}


def plan_cases(device: str) -> tuple[list[TrainingCase], dict[str, str]]:
    """Returns the cases of all engines that this machine supports, and the others by name with the reason."""
    cases, left_out = [], {}
    for engine, capabilities in CAPABILITIES.items():
        if missing := capabilities.missing_requirement:
            left_out[engine] = missing
            continue
        for stage in sorted(capabilities.values("zero_stage"), key=_STAGES.index):
            for precision in _PRECISIONS:
                case = TrainingCase(engine, stage, precision)
                try:
                    check(engine, zero_stage=stage, precision=precision, device_type=device)
                except ConfigError as error:
                    left_out[f"{engine} {precision}"] = str(error)
                    continue
                if device == "cpu" and precision in ("fp16", "tf32"):
                    reason = "no GPU" if precision == "tf32" else "takes minutes on a CPU"
                    left_out[precision] = reason
                    continue
                cases.append(case)
    assert set(_PRECISIONS) | {"auto"} == set(SETTINGS["precision"])
    return cases, left_out


def compare(case: TrainingCase, line: Mapping[str, Any], reference: Sequence[float]) -> dict[str, Any]:
    """Returns the row of a case: its result against ``reference``, the losses of the CPU in FP32."""
    bound = LOSS_BOUNDS[case.precision]
    row = asdict(case) | {"bound": bound, "seconds": line.get("seconds"), "losses": line.get("losses")}
    if "losses" not in line:
        return row | {"status": "failed", "deviation": None, "reason": str(line.get("error"))}
    deviations = [abs(loss - other) / abs(other) for loss, other in zip(line["losses"], reference, strict=True)]
    # not `max`, which passes over NaN
    worst = next((value for value in deviations if value != value), max(deviations))
    reason = ""
    if line["skipped"]:
        reason = f"skipped {line['skipped'][0]}"
    elif not worst <= bound:
        step = next(number for number, value in enumerate(deviations, 1) if not value <= bound)
        reason = f"the loss is off by {worst:.2g}, first beyond {bound:g} at step {step}"
    return row | {"status": "deviates" if reason else "agrees", "deviation": worst, "reason": reason}


def _train_reference(request: PartRequest) -> list[float]:
    job = TrainingJob([asdict(_REFERENCE)], "cpu", request.small, _REFERENCE_S, _output(request, "reference"))
    ended, lines = _run_job(job, request, _REFERENCE_S)
    losses = next((line["losses"] for line in lines if "losses" in line), None)
    if losses is None:
        reasons = [line.get("error") or line.get("unsupported") for line in lines if "begin" not in line]
        raise DtrainError(f"the native engine does not train in FP32 on the CPU: {ended.error or reasons}")
    return list(losses)


def _train_engines(request: PartRequest, deadline: float, results: dict[str, Any]) -> None:
    cases, left_out = plan_cases(request.device)
    results["left_out"] |= left_out
    results["planned"] = dict(Counter(case.engine for case in cases))
    known = {TrainingCase(row["engine"], row["zero_stage"], row["precision"]) for row in results["cases"]}
    engines = list(dict.fromkeys(case.engine for case in cases))
    left = {engine: [case for case in cases if case.engine == engine and case not in known] for engine in engines}
    while left:
        engine = next(iter(left))
        start = (_DEEPSPEED_START_S if engine == "deepspeed" else _START_S)[request.device]
        weights = [
            len(found) + (_DEEPSPEED_START_CASES if name == "deepspeed" else _START_CASES)
            for name, found in left.items()
        ]
        seconds = (deadline - time.monotonic()) * weights[0] / sum(weights)
        own = left.pop(engine)
        if seconds < start and engine != engines[0]:
            reason = f"no time left: {max(0.0, seconds):.0f} s, and its start may take {start:.0f} s"
            results["left_out"] |= {case.name: reason for case in own}
        else:
            _train_engine(request, own, time.monotonic() + seconds, results)
        save_partial(request, results)


def _train_engine(
    request: PartRequest, cases: Sequence[TrainingCase], deadline: float, results: dict[str, Any]
) -> None:
    """Trains the cases of one engine, in a new process after each crash."""
    reference, left, reason = results["reference"], list(cases), "no time left"
    for number in range(_CRASHES):
        seconds = deadline - time.monotonic()
        if not left or (seconds <= 0 and number):
            break
        output = _output(request, f"{cases[0].engine}-{number}")
        job = TrainingJob([asdict(case) for case in left], request.device, request.small, seconds, output)
        ended, lines = _run_job(job, request, max(0.0, seconds) + _GRACE_S[request.device])
        for line in lines:
            case = TrainingCase(**(line.get("begin") or {key: line[key] for key in asdict(_REFERENCE)}))
            if "begin" in line:
                begun = case
                continue
            left.remove(case)
            if "unsupported" in line:
                results["left_out"][case.name] = line["unsupported"]
            else:
                results["cases"].append(compare(case, line, reference))
        if ended.error and lines and "begin" in lines[-1]:
            left.remove(begun)
            results["cases"].append(compare(begun, {"error": ended.error}, reference))
        elif ended.error and not lines:
            results["cases"].append(compare(left.pop(0), {"error": f"its process {ended.error}"}, reference))
        if not ended.error:
            break
        save_partial(request, results)
    else:
        reason = f"its process failed {_CRASHES} times"
    results["left_out"] |= {case.name: reason for case in left}


def _run_job(job: TrainingJob, request: PartRequest, limit_s: float) -> tuple[Ended, list[dict[str, Any]]]:
    output = Path(job.output)
    output.unlink(missing_ok=True)
    log = output.with_suffix(".log")
    threads = 1 if request.small else min(_MOST_THREADS, num_cores())
    ended = run_process(_WORKER, json.dumps(asdict(job)), limit_s=limit_s, threads=threads, log=log)
    text = output.read_text(encoding="utf-8") if output.exists() else ""
    # a killed process may leave half a line
    return ended, [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _output(request: PartRequest, name: str) -> str:
    return str(Path(request.directory, f"{name}.jsonl"))


def failures(results: Mapping[str, Any]) -> list[str]:
    cases = [row for row in results["cases"] if row["status"] != "agrees"]
    lines = [f"{_name(row)} {row['status']}: {row['reason']}" for row in cases]
    tests = (results["tests"] or {}).get("failures", {})
    return lines + [f"{test}: {reason}" for test, reason in tests.items()]


def conclusions(results: Mapping[str, Any]) -> list[str]:
    lines = []
    for engine, planned in results["planned"].items():
        rows = [row for row in results["cases"] if row["engine"] == engine]
        good = [row for row in rows if row["status"] == "agrees"]
        precisions = ", ".join(name for name in _PRECISIONS if any(row["precision"] == name for row in good))
        stages = ", ".join(map(str, sorted({row["zero_stage"] for row in good})))
        if not rows:
            lines.append(f"engine={engine}: not trained, {planned} cases left out")
            continue
        where = f": {precisions}; stages {stages}" if good else ""
        others = f" ({planned - len(rows)} left out)" if planned > len(rows) else ""
        lines.append(f"engine={engine}: {len(good)} of {len(rows)} cases follow the CPU's FP32 curve{where}{others}")
    if counts := _counts(results):
        lines.append(f"tests/gpu: {counts}")
    return lines


def section(results: Mapping[str, Any]) -> list[str]:
    bounds = ", ".join(f"{name} {LOSS_BOUNDS[name]:g}" for name in _PRECISIONS)
    lines = [
        f"The default model, {STEPS} steps on one rank, AdamW. Largest `|loss - CPU's| / CPU's` of any step; the CPU's "
        f"losses are the native engine's in FP32 on this machine. Bounds: {bounds}. FP16 has a constant loss scale.",
    ]
    if reference := results.get("reference"):
        lines += ["", f"The CPU's loss falls from {reference[0]:.4f} to {reference[-1]:.4f}."]
    if cases := results.get("cases"):
        rows = [(row["engine"], row["zero_stage"]) for row in cases]
        by_case = {(row["engine"], row["zero_stage"], row["precision"]): row for row in cases}
        precisions = [name for name in _PRECISIONS if any(row["precision"] == name for row in cases)]
        cells = [
            (engine, str(stage), *(_cell(by_case.get((engine, stage, name))) for name in precisions))
            for engine, stage in dict.fromkeys(rows)
        ]
        lines += ["", Table("Curves", ("engine", "stage", *precisions), cells).markdown()]
    if counts := _counts(results):
        lines += ["", f"`tests/gpu`: {counts}. Skipped:", ""]
        lines += [f"- {count}: {reason}" for reason, count in results["tests"]["skips"].items()] or ["- none"]
    return lines


def _counts(results: Mapping[str, Any]) -> str:
    """Returns the counts of tests, or an empty string if none ran."""
    counts = {key: (results.get("tests") or {}).get(key, 0) for key in ("passed", "failed", "skipped")}
    return ", ".join(f"{count} {key}" for key, count in counts.items()) if any(counts.values()) else ""


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["deviation"] is None:
        return row["status"] if row.get("losses") is None else "not finite"
    return f"{row['deviation']:.1e}" + ("" if row["status"] == "agrees" else " deviates")


def _name(row: Mapping[str, Any]) -> str:
    return TrainingCase(row["engine"], row["zero_stage"], row["precision"]).name
