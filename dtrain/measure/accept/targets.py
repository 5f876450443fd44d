"""The table of targets: for each one the figure of this machine, met or not, and the next thing to do. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from dtrain.measure.bench.records import AnyResults, OperationResults, TableResults, TrainingResults
from dtrain.measure.bench.report.step import figures_of
from dtrain.measure.bench.targets import AT_LEAST, TARGETS, Target, targets_of
from dtrain.tools.tables import Table

_LEAST_PARAMETERS = 10**7  # a smaller model says nothing about any target
_MEASURE = "`dtrain accept goal=figures`"
_DIGITS = {".0%": ".1%", ".2f": ".3f", "g": ".3f"}
"""Format of a figure by that of its bound: one digit more."""
_TODO = {
    "G2": "read the choice for each Linear; for the loss `dtrain probe` names the sensitive modules",
    "G3": "look at the slowest kernel of the optimizer phase in the profile",
    "G4": "join the kernels of the optimizer phase, or find what waits, in the profile",
    "G5": "compare memory and formula by kind",
    "G6": "set model.loss_chunk to other sizes, or fuse its passes",
    "G7": "compare the profiles; torch's deterministic attention backward is the usual cost",
}

Measured = tuple[str, str, int, Mapping[str, float]]
"""Suite, case, parameters, and figures by name."""


def table_of_targets(results: Iterable[AnyResults]) -> str:
    """Returns a row for every target, whether it was measured or not, as Markdown."""
    measured = [found for one in results for found in _figures(one) if found[2] > _LEAST_PARAMETERS]
    slowest = _slowest_class(results)
    rows: dict[tuple[str, ...], tuple[str, ...]] = {}
    for target in TARGETS:
        what = target.figure + (f", {target.case}" if target.case not in ("", "dtrain", "chunked") else "")
        what += f", {target.model}" if target.model else ""
        row = _row(target, measured, slowest)
        # one row for a figure of several suites or cases, of MFU the better one and else the worse
        key, deciding = (target.key, what, target.text), "met" if target.figure == "MFU" else "NOT MET"
        if key not in rows or not rows[key][0] or row[1] == deciding:
            rows[key] = row
    lines = [(key, what, row[0], text, *row[1:]) for (key, what, text), row in rows.items()]
    return Table("Targets", ("", "what", "figure", "target", "", "next"), lines).markdown()


def _row(target: Target, measured: Iterable[Measured], slowest: str) -> tuple[str, str, str]:
    """Returns figure, whether it is met, and the next thing to do; the worst of several figures counts."""
    values = [
        (figures[target.figure], case)
        for suite, case, numel, figures in measured
        if target in targets_of(suite, case, numel) and target.figure in figures
    ]
    if not values:
        return "", "not measured", f"measure it: {_MEASURE}"
    value, case = min(values) if target.comparison == AT_LEAST else max(values, key=lambda found: abs(found[0]))
    text = f"{value:{_DIGITS.get(target.digits, target.digits)}} ({case})"
    if target.is_met(value):
        return text, "met", ""
    return text, "NOT MET", _TODO.get(target.key, slowest)


def _figures(results: AnyResults) -> Iterator[Measured]:
    if isinstance(results, TrainingResults) and results.suite == "step":
        for result in results.cases:
            if result.rounds:
                yield "step", result.case.name, result.footprint.num_parameters, figures_of(results, result)
    if isinstance(results, TableResults):
        for row in results.rows:
            if results.suite == "memory":
                name = f"{row['precision']}, stage {row['stage']}"
                yield "memory", name, row["num_parameters"], {"states over the formula": row["ratio"]}
            if results.suite == "profile":
                yield "profile", row["precision"], row["num_parameters"], _phase(row)
    if isinstance(results, OperationResults) and results.suite == "loss-head":
        full = {timing.workload: timing for timing in results.timings if timing.case == "full logits, compiled"}
        for timing in results.timings:
            if timing.case.startswith("dtrain") and timing.workload == "bf16":
                figures = {"memory beside the gradients, of full FP32 logits": timing.shares["beside the gradients"]}
                if timing.workload in full:
                    ratio = median(full[timing.workload].ms) / median(timing.ms)
                    figures["speed over compiled full logits"] = ratio
                bench = results.config["bench"]
                yield "loss-head", timing.case, bench["hidden_dim"] * bench["vocab_size"], figures


def _phase(row: Mapping[str, Any]) -> dict[str, float]:
    phase = row["optimizer"]
    return {
        "optimizer phase, of the copy's bandwidth": phase["copy_share"],
        "launches of the optimizer phase": phase["num_launches"],
        "waits of the host in it": sum(phase["synchronizations"].values()),
    }


def _slowest_class(results: Iterable[AnyResults]) -> str:
    """Returns what takes most time of a profiled step outside products and attention."""
    rows = [row for one in results if isinstance(one, TableResults) and one.suite == "profile" for row in one.rows]
    if not rows:
        return f"profile a step: {_MEASURE}"
    row = rows[-1]
    others = {key: ms for key, ms in row["ms_by_class"].items() if key not in ("matmul", "attention")}
    others["idle"] = row["idle_ms"]
    most = max(others, key=lambda key: others[key])
    return f"{most} takes {others[most] / row['wall_ms']:.0%} of the step in {row['precision']}: see its profile"
