"""The lines of a job on the page and the console, read from its results file. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain.measure.accept.first_uses import OPTIONAL, SAME_BITS
from dtrain.measure.accept.job import DONE, FAILED, Ended, Lines, read_json
from dtrain.measure.accept.tests_report import lines_of_tests
from dtrain.measure.bench.records import TableResults, read_results
from dtrain.measure.bench.report.document import describe
from dtrain.tools.processes import failure_reason
from dtrain.tools.tables import Table, plural


def read_lines(found: Ended, folder: Path) -> Lines:
    """Returns the lines of a job's results. An error in them must not cost the page."""
    path = folder / found.results
    if not path.exists():
        return Lines()
    try:
        if path.suffix == ".jsonl":
            return lines_of_tests(path, has_ended=found.status in (DONE, FAILED))
        if path.name == "report.json":
            return _curves(read_json(path))
        values = read_json(path)
        return _first_uses(values) if "steps" in values else _bench(path)
    except Exception as error:
        return Lines(section=[f"The results cannot be shown: {failure_reason(error)}"])


def _bench(path: Path) -> Lines:
    results = read_results(path)
    report = describe(results)
    section = [*report.facts[1:]]  # without the command, which stands above
    for table in report.tables:
        section += [f"{table.title}:", table.markdown()]
    if isinstance(results, TableResults):
        return Lines(results.conclusions, results.failures, results.left_out, "\n\n".join(section).splitlines())
    section = "\n\n".join([*section, *report.notes]).splitlines()
    failures = getattr(results, "failures", [])
    return Lines(
        report.conclusions,
        [f"{failure.case.name}: {failure.reason}" for failure in failures if failure.case.is_dtrain],
        {failure.case.name: failure.reason for failure in failures if not failure.case.is_dtrain},
        section,
    )


def _first_uses(results: Mapping[str, Any]) -> Lines:
    steps = results["steps"]
    wrong = [row for row in steps if row["error"]]
    costs = ", ".join(f"{row['step']} {row['s']:.1f} s" for row in steps if not row["error"] and row["s"] >= 0.05)
    lines = [f"{len(steps) - len(wrong)} of {len(steps)} work: {costs or 'all within 0.05 s'}"]
    lines += [f"{row['step']} fails: {row['error']}" for row in wrong if row["step"] in OPTIONAL]
    lines += [f"{row['step']}: {row['found']}" for row in steps if row["step"] in ("device", "Triton") and row["found"]]
    failures = [f"{row['step']}: {row['error']}" for row in wrong if row["step"] not in OPTIONAL]
    cells = [
        (row["step"], f"{row['s']:.2f}", f"FAILS: {row['error']}" if row["error"] else row["found"])
        for row in steps
        if row["found"] != SAME_BITS
    ]
    section = [Table("First uses", ("first use", "s", "result"), cells).markdown(), ""] if cells else []
    for name, value in results["host"].items():
        text = ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else value
        section.append(f"- {name}: {text}")
    return Lines(lines, failures, {}, section)


def _curves(report: Mapping[str, Any]) -> Lines:
    rows = report.get("rows", [])
    left_out = {_case(row): row["reason"] for row in rows if row["status"] == "left out"}
    rows = [row for row in rows if row["status"] != "left out"]
    failures = [f"{_case(row)} {row['status']}: {row['reason']}" for row in rows if row["status"] != "agrees"]
    conclusions = []
    for engine in dict.fromkeys(row["engine"] for row in rows):
        own = [row for row in rows if row["engine"] == engine]
        good = [row for row in own if row["status"] == "agrees"]
        names = ", ".join(dict.fromkeys(row["precision"] for row in good))
        stages = ", ".join(map(str, sorted({row["zero_stage"] for row in good})))
        where = f": {names}; stages {stages}" if good else ""
        conclusions.append(f"{len(good)} of {plural(len(own), 'case')} follow the CPU's FP32 curve{where}")
    return Lines(conclusions, failures, left_out, _table_of_curves(rows, report.get("reference") or []))


def _table_of_curves(rows: Sequence[Mapping[str, Any]], reference: Sequence[float]) -> list[str]:
    bounds = {row["precision"]: f"{row['precision']} {row['bound']:g}" for row in rows if row["bound"] is not None}
    lines = [
        f"Largest `|loss - CPU's| / CPU's` of {len(reference)} steps. Bounds: {', '.join(bounds.values())}. FP16 has a "
        "constant loss scale."
    ]
    if reference:
        lines += ["", f"The CPU's loss falls from {reference[0]:.4f} to {reference[-1]:.4f}."]
    if rows:
        precisions = list(dict.fromkeys(row["precision"] for row in rows))
        by_case = {(row["engine"], row["zero_stage"], row["precision"]): row for row in rows}
        cells = [
            (engine, str(stage), *(_cell(by_case.get((engine, stage, name))) for name in precisions))
            for engine, stage in dict.fromkeys((row["engine"], row["zero_stage"]) for row in rows)
        ]
        lines += ["", Table("Curves", ("engine", "stage", *precisions), cells).markdown()]
    return lines


def _case(row: Mapping[str, Any]) -> str:
    return f"{row['engine']} {row['precision']}, stage {row['zero_stage']}"


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["deviation"] is None:
        return "not finite" if row["losses"] else str(row["status"])
    return f"{row['deviation']:.1e}" + ("" if row["status"] == "agrees" else " deviates")
