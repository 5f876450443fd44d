"""Part e: FP8 over the native engine's own BF16 at 1.2B and 3B, the choice for each Linear, and the loss (G2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from dtrain.telemetry.texts import compact
from dtrain.tools.accept.part import PartRequest
from dtrain.tools.accept.parts.interleaved import (
    CaseRun,
    InterleavedRuns,
    Record,
    by_case,
    dtrain_case,
    error_lines,
    figures_of,
    gib,
    graphs_text,
    records_of,
    speed_ups,
    warning_lines,
    window_ms,
)
from dtrain.tools.bench.report.statistics import spread
from dtrain.tools.tables import Column, Table

BF16, TENSORWISE, ROWWISE = "BF16", "FP8 tensorwise", "FP8 rowwise"
_EAGER = ", eager"
TARGETS = {"1.2B": 1.30, "3B": 1.40}
"""G2: speed-ups over BF16."""

LOSS_TARGET = 0.0025
"""G2: largest relative distance of the loss from BF16's."""

_MICRO_BATCHES = (4, 2, 1)  # leaves room for the FP8 copies of the weights
_RECIPES = {BF16: None, TENSORWISE: "tensorwise", ROWWISE: "rowwise"}
_ORDER = (  # (model, case, compiled, run), in order of value; each pair alternates
    ("1.2B", BF16, True, 0),
    ("1.2B", TENSORWISE, True, 0),
    ("1.2B", BF16, True, 1),
    ("3B", BF16, True, 0),
    ("3B", TENSORWISE, True, 0),
    ("3B", BF16, True, 1),
    ("1.2B", TENSORWISE, True, 1),
    ("1.2B", ROWWISE, True, 0),
    ("1.2B", BF16, False, 0),
    ("1.2B", TENSORWISE, False, 0),
    ("3B", TENSORWISE, True, 1),
    ("3B", ROWWISE, True, 0),
    ("1.2B", ROWWISE, True, 1),
)
_SECONDS = {BF16: 35.0, TENSORWISE: 50.0, ROWWISE: 50.0}
_MODEL_FACTOR = {"1.2B": 1.0, "3B": 1.4}
_SMALL_S = 8.0
_OPTIONS = {"warmup": 6, "windows": 3, "steps": 8, "is_text": True}
_SMALL_OPTIONS = {"warmup": 2, "windows": 2, "steps": 4, "is_text": True}
_EMULATED = (
    "FP8 was emulated in FP32, because this device has no FP8 Tensor Cores: the times say nothing about a device that "
    "has them, but the losses do."
)
_NOTES = (
    "BF16 and FP8 are run in turn, each time in a new process, from the same weights on the same text. Speed-up: "
    "tokens/s over BF16's, run by run. Loss: mean over the last quarter of the steps, against a BF16 run that took the "
    "same steps. Compiled: `model.compile=blocks`; FP8 products are operators in the graphs and break none."
)


def plan(*, small: bool) -> list[CaseRun]:
    """Returns the runs in order of value."""
    if small:
        order = [(name, number) for number in range(2) for name in (BF16, TENSORWISE, ROWWISE)]
        return [_run("tiny", name, number, _SMALL_S, _SMALL_OPTIONS, is_compiled=False) for name, number in order]
    return [
        _run(model, name, number, _SECONDS[name] * _MODEL_FACTOR[model], _OPTIONS, is_compiled=is_compiled)
        for model, name, is_compiled, number in _ORDER
    ]


def _run(
    model: str, name: str, number: int, seconds: float, options: Mapping[str, Any], *, is_compiled: bool
) -> CaseRun:
    recipe = _RECIPES[name]
    title = name if is_compiled else name + _EAGER
    case = dtrain_case(title, "bf16" if recipe is None else "fp8", recipe=recipe)
    return CaseRun(case, model, number, seconds, {**options, "is_compiled": is_compiled})


def run(request: PartRequest) -> dict[str, Any]:
    """Trains BF16 and FP8 in turn until the time is used."""
    runs = InterleavedRuns(request, _MICRO_BATCHES)
    runs.run(plan(small=request.small))
    results = runs.results
    if request.small:
        results["left_out"]["1.2B and 3B, compiled blocks"] = "for a GPU of 32 GiB or more"
    results["failures"] = error_lines(runs.records) + ([] if request.small else loss_failures(results))
    return results | {"conclusions": conclusions(results)}


def loss_difference(records: Sequence[Record], baseline: Sequence[Record]) -> float | None:
    """Returns how far the last quarter's mean loss is from BF16's, relatively; None if no run took the same steps."""
    pairs = [
        (record.figures, other.figures)
        for record in records
        for other in baseline
        if record.figures is not None and other.figures is not None and _steps(record.figures) == _steps(other.figures)
    ]
    if not pairs:
        return None
    figures, reference = pairs[0]
    count = max(1, len(figures["losses"]) // 4)
    own, expected = (_last_mean(values["losses"], count) for values in (figures, reference))
    return None if own is None or expected is None else own / expected - 1


def _steps(figures: Mapping[str, Any]) -> tuple[int, int]:
    return figures["micro_batch"], len(figures["losses"])


def _last_mean(losses: Sequence[float | None], count: int) -> float | None:
    """Returns the mean of the last losses; None if one of them is not finite."""
    last = [loss for loss in losses[-count:] if loss is not None]
    return mean(last) if len(last) == min(count, len(losses)) else None


def section(results: Mapping[str, Any]) -> list[str]:
    """Returns the table of steps, and for each model and recipe the choice for each Linear."""
    groups = by_case(records_of(results))
    if not groups:
        return conclusions(results)
    columns: list[Column[tuple[tuple[str, str], list[Record]]]] = [
        ("model", lambda row: row[0][0]),
        ("case", lambda row: row[0][1]),
        ("micro-batch", lambda row: str(row[1][0].micro_batch)),
        ("ms a step", lambda row: spread(window_ms(row[1]), 1)),
        ("tokens/s", lambda row: compact(median(record.tokens_per_s for record in row[1]))),
        ("speed-up over BF16", lambda row: _speed_up_text(groups, *row[0])),
        ("loss", lambda row: _loss_text(row[1])),
        ("loss against BF16", lambda row: _difference_text(groups, *row[0])),
        ("peak GiB", lambda row: gib(row[1], "peak_allocated")),
        ("graphs, breaks", lambda row: graphs_text(row[1])),
    ]
    lines = [*conclusions(results), "", Table.of("FP8", columns, list(groups.items())).markdown(), "", _NOTES]
    lines += warning_lines(records_of(results))
    for (model, name), records in groups.items():
        rows = choice_rows(records[-1])
        if rows:
            columns_of_choice = ("weight", "Linears", "BF16 ms", "FP8 ms", "ratio", "format", "because")
            title = f"Choice for each Linear, {name}, {model}, all three products with the casts:"
            lines += ["", title, "", Table("", columns_of_choice, rows).markdown()]
    return lines


def conclusions(results: Mapping[str, Any]) -> list[str]:
    """Returns one line for each model and recipe, beside the targets."""
    groups = by_case(records_of(results))
    lines = []
    for (model, name), records in groups.items():
        baseline = baseline_of(groups, model, name)
        if name.startswith(BF16) or not baseline:
            continue
        ratios, difference = speed_ups(records, baseline), loss_difference(records, baseline)
        target = f" (target {TARGETS[model]:.2f})" if model in TARGETS and name.startswith(TENSORWISE) else ""
        speed = f"{median(ratios):.2f} x BF16{target}" if ratios else "speed-up not measured"
        loss = "not compared" if difference is None else f"{difference:+.2%} (target {LOSS_TARGET:.2%})"
        formats = [linear["format"] for linear in figures_of(records, "linears")[-1]]
        chosen = f"{formats.count('fp8')} of {len(formats)} Linears in FP8"
        lines.append(f"G2, {model}, {name}: {speed}, {chosen}; loss against BF16 {loss}.")
    if any(_is_emulated(records) for records in groups.values()):
        lines.append(_EMULATED)
    return lines or ["G2: not measured."]


def loss_failures(results: Mapping[str, Any]) -> list[str]:
    """Returns a line for each case whose loss is too far from BF16's."""
    groups = by_case(records_of(results))
    found = []
    for (model, name), records in groups.items():
        difference = loss_difference(records, baseline_of(groups, model, name))
        if difference is not None and abs(difference) > LOSS_TARGET:
            found.append(f"{name}, {model}: the loss is {difference:+.2%} from BF16's; at most {LOSS_TARGET:.2%}")
    return found


def baseline_of(groups: Mapping[tuple[str, str], list[Record]], model: str, name: str) -> list[Record]:
    """Returns the BF16 runs to compare ``name`` with: compiled or eager as it is."""
    return groups.get((model, BF16 + _EAGER if name.endswith(_EAGER) else BF16), [])


def choice_rows(record: Record) -> list[tuple[str, ...]]:
    """Returns a row for each shape and format of the Linears; equal ones are counted."""
    assert record.figures is not None
    shapes: dict[tuple[Any, ...], int] = {}
    for linear in record.figures["linears"]:
        size = f"{linear['out_features']} x {linear['in_features']}"
        key = (size, linear["bf16_ms"], linear["float8_ms"], linear["format"], linear["reason"])
        shapes[key] = shapes.get(key, 0) + 1
    return [
        (size, str(count), _ms(bf16_ms), _ms(float8_ms), _ratio(bf16_ms, float8_ms), chosen, reason)
        for (size, bf16_ms, float8_ms, chosen, reason), count in shapes.items()
    ]


def _is_emulated(records: Sequence[Record]) -> bool:
    return any(figures_of(records, "emulates_float8"))


def _speed_up_text(groups: Mapping[tuple[str, str], list[Record]], model: str, name: str) -> str:
    ratios = [] if name.startswith(BF16) else speed_ups(groups[model, name], baseline_of(groups, model, name))
    return spread(ratios, 2) if ratios else ""


def _difference_text(groups: Mapping[tuple[str, str], list[Record]], model: str, name: str) -> str:
    if name.startswith(BF16):
        return ""
    difference = loss_difference(groups[model, name], baseline_of(groups, model, name))
    return "not compared" if difference is None else f"{difference:+.2%}"


def _loss_text(records: Sequence[Record]) -> str:
    losses = records[-1].figures["losses"] if records[-1].figures else []
    return f"{losses[0]:.3f} to {losses[-1]:.3f}" if losses and None not in (losses[0], losses[-1]) else "not finite"


def _ms(value: float | None) -> str:
    return "not timed" if value is None else f"{value:.3f}"


def _ratio(bf16_ms: float | None, float8_ms: float | None) -> str:
    return "" if bf16_ms is None or float8_ms is None else f"{float8_ms / bf16_ms:.2f}"
