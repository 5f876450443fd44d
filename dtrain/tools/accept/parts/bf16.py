"""Part d: BF16 training of 1.2B and 3B parameters at T 4096, against FSDP2, DeepSpeed and plain PyTorch (G1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from dtrain.precision.hardware import rate
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
from dtrain.tools.accept.parts.models import MODELS, count_flops
from dtrain.tools.bench.records import BenchmarkCase
from dtrain.tools.bench.report.statistics import spread
from dtrain.tools.tables import Column, Table

DTRAIN, FSDP2, DEEPSPEED, PLAIN = "dtrain", "FSDP2", "DeepSpeed", "plain AMP"
_EAGER = ", eager"
TARGETS = {"mfu": 0.57, FSDP2: 1.15, DEEPSPEED: 1.3}
"""G1: MFU with causal FLOPs, and speed-ups."""

_CASES = {
    DTRAIN: dtrain_case(DTRAIN),
    FSDP2: BenchmarkCase(FSDP2, "fsdp2_no_reshard", 1, "bf16"),  # on one GPU resharding only adds copies
    DEEPSPEED: BenchmarkCase(DEEPSPEED, "deepspeed_2", 1, "bf16"),
    PLAIN: BenchmarkCase(PLAIN, "plain", 1, "bf16"),
}
_ORDER = (  # (model, case, compiled, run), in order of value; each pair alternates
    ("1.2B", DTRAIN, True, 0),
    ("1.2B", FSDP2, True, 0),
    ("1.2B", DTRAIN, True, 1),
    ("1.2B", FSDP2, True, 1),
    ("1.2B", DEEPSPEED, True, 0),
    ("1.2B", DTRAIN, False, 0),
    ("3B", DTRAIN, True, 0),
    ("3B", FSDP2, True, 0),
    ("3B", DEEPSPEED, True, 0),
    ("3B", DTRAIN, True, 1),
    ("3B", FSDP2, True, 1),
    ("1.2B", PLAIN, True, 0),
    ("1.2B", DEEPSPEED, True, 1),
    ("1.2B", DEEPSPEED, False, 0),
    ("3B", DEEPSPEED, True, 1),
    ("1.2B", PLAIN, True, 1),
    ("1.2B", DTRAIN, True, 2),
    ("1.2B", FSDP2, True, 2),
    ("3B", PLAIN, True, 0),
    ("3B", DTRAIN, False, 0),
)
_START_S = {DTRAIN: 20.0, FSDP2: 20.0, DEEPSPEED: 30.0, PLAIN: 15.0}
_MODEL_FACTOR, _COMPILE_S = {"1.2B": 1.0, "3B": 1.5}, 15.0
_SMALL_S = {DTRAIN: 8.0, FSDP2: 8.0, DEEPSPEED: 15.0, PLAIN: 6.0}
_NOTES = (
    "Each case is run several times, in turn with the others, each time in a new process: warm-up, then windows of "
    "steps timed by events, without a read of the loss. Tokens are random, made on the device. ms: median (least to "
    "most) over the windows. Compiled: each block by `torch.compile`, dtrain's through `model.compile=blocks`; the "
    "loss is eager in all cases. FSDP2 keeps its weights gathered. MFU: model FLOPs over the published dense peak of "
    "the exact device, attention counted by its causal half or in full. dtrain's speed-up: its tokens/s over the "
    "case's, both compiled or both eager, run by run."
)


def plan(*, small: bool) -> list[CaseRun]:
    """Returns the runs in order of value."""
    if not small:
        return [_run_case(model, name, compiled, number) for model, name, compiled, number in _ORDER]
    options = {"warmup": 1, "windows": 2, "steps": 2}
    order = (DTRAIN, PLAIN, FSDP2, DEEPSPEED)
    return [
        CaseRun(_case(name, compiled=False), "tiny", number, _SMALL_S[name], options)
        for number in range(2)
        for name in order
    ]


def _run_case(model: str, name: str, compiled: bool, number: int) -> CaseRun:
    seconds = (_START_S[name] + _COMPILE_S * compiled) * _MODEL_FACTOR[model]
    options = {"is_compiled": compiled, "warmup": 4, "windows": 3, "steps": 6}
    return CaseRun(_case(name, compiled=compiled), model, number, seconds, options)


def _case(name: str, *, compiled: bool) -> BenchmarkCase:
    return replace(_CASES[name], name=name if compiled else name + _EAGER)


def run(request: PartRequest) -> dict[str, Any]:
    """Trains the cases in runs until the time is used."""
    runs = InterleavedRuns(request)
    runs.run(plan(small=request.small))
    results = runs.results
    if request.small:
        results["left_out"]["1.2B and 3B, compiled blocks"] = "for a GPU of 32 GiB or more"
    own = [record for record in runs.records if record.name.startswith(DTRAIN)]
    peers = [record for record in runs.records if not record.name.startswith(DTRAIN)]
    results["failures"] = error_lines(own)  # a peer may fail; the page says so
    results["left_out"] |= {f"{record.name}, {record.model}": record.error for record in peers if record.error}
    return results | {"conclusions": conclusions(results)}


def utilization(record: Record) -> tuple[float | None, float | None]:
    """Returns the MFU with causal and with full FLOPs, in [0, 1]; None without a published peak."""
    assert record.figures is not None
    peak = rate(record.figures["device"], "bf16")
    if peak is None:
        return None, None
    flops = count_flops(MODELS[record.model])
    return (
        flops.causal * record.tokens_per_s / peak / 1e12,
        flops.full * record.tokens_per_s / peak / 1e12,
    )


def section(results: Mapping[str, Any]) -> list[str]:
    """Returns the table of all cases."""
    groups = by_case(records_of(results))
    lines = [*conclusions(results), ""]
    columns: list[Column[tuple[tuple[str, str], list[Record]]]] = [
        ("model", lambda row: row[0][0]),
        ("case", lambda row: row[0][1]),
        ("micro-batch", lambda row: ", ".join(dict.fromkeys(str(record.micro_batch) for record in row[1]))),
        ("ms a step", lambda row: spread(window_ms(row[1]), 1)),
        ("tokens/s", lambda row: compact(median(record.tokens_per_s for record in row[1]))),
        ("MFU causal", lambda row: _percent(utilization(_median_record(row[1]))[0])),
        ("MFU full", lambda row: _percent(utilization(_median_record(row[1]))[1])),
        ("peak GiB", lambda row: gib(row[1], "peak_allocated")),
        ("reserved GiB", lambda row: gib(row[1], "peak_reserved")),
        ("first step s", lambda row: f"{max(figures_of(row[1], 'first_step_s')):.1f}"),
        ("graphs, breaks", lambda row: graphs_text(row[1])),
        ("dtrain's speed-up", lambda row: _speed_up_text(groups, *row[0])),
    ]
    if groups:
        lines += [Table.of("BF16", columns, list(groups.items())).markdown(), "", _NOTES]
    lines += warning_lines(records_of(results))
    return lines


def conclusions(results: Mapping[str, Any]) -> list[str]:
    """Returns one line for each model, its figures beside the targets."""
    groups = by_case(records_of(results))
    lines = []
    for model in dict.fromkeys(model for model, _ in groups):
        own = groups.get((model, DTRAIN)) or groups.get((model, DTRAIN + _EAGER))
        if not own:
            continue
        record = _median_record(own)
        causal, full = utilization(record)
        found = [
            f"{record.step_ms:.1f} ms a step of {record.micro_batch} sequences, {compact(record.tokens_per_s)} tokens/s"
        ]
        if causal is None:
            found.append("MFU unknown, because the device has no published peak")
        else:
            found.append(f"MFU {_percent(causal)} causal, {_percent(full)} full (target {TARGETS['mfu']:.0%} causal)")
        for peer in (FSDP2, DEEPSPEED, PLAIN):
            other = groups.get((model, peer)) or groups.get((model, peer + _EAGER)) or []
            target = f" (target {TARGETS[peer]:g})" if peer in TARGETS else ""
            ratios = speed_ups(own, other)
            found.append(f"{median(ratios):.2f} x {other[0].name}{target}" if ratios else f"{peer} not measured")
        lines.append(f"G1, {model}, {record.name}: {'; '.join(found)}.")
    return lines or ["G1: not measured."]


def _speed_up_text(groups: Mapping[tuple[str, str], list[Record]], model: str, name: str) -> str:
    own = groups.get((model, DTRAIN + _EAGER if name.endswith(_EAGER) else DTRAIN), [])
    ratios = [] if name.startswith(DTRAIN) else speed_ups(own, groups[model, name])
    return spread(ratios, 2) if ratios else ""


def _median_record(records: Sequence[Record]) -> Record:
    return sorted(records, key=lambda record: record.tokens_per_s)[len(records) // 2]


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"
