"""The cases of part f with keys that take less memory: recomputation, and states on the host (``engine.offload``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dtrain.config.blocks import Blocks
from dtrain.tools.accept.parts.interleaved import CaseRun, Record, dtrain_case, gib, window_ms
from dtrain.tools.accept.parts.models import MODELS
from dtrain.tools.bench.report.statistics import spread
from dtrain.tools.tables import Column, Table

SELECTIVE, FULL, OFFLOAD = "recompute=selective", "recompute=full", "offload=cpu"
_CASES = {
    SELECTIVE: replace(dtrain_case(SELECTIVE), blocks=Blocks(recompute="selective")),
    FULL: replace(dtrain_case(FULL), blocks=Blocks(recompute="full")),
    OFFLOAD: replace(dtrain_case(OFFLOAD), blocks=Blocks(), offload="cpu"),
}
_SECONDS = {SELECTIVE: 20.0, FULL: 20.0, OFFLOAD: 35.0}
_SMALL_S = 8.0
_NOTES = (
    "The same model and micro-batch, eager, each case in a new process. Step: tokens/s of the first case over the "
    "case's. Activations: bytes that a forward leaves for backward. States on the device: kinds of the formula that do "
    "not lie on the host, over their bytes by the formula; `offload=cpu` changes nothing on a CPU."
)


def plan(model: str, *, small: bool) -> list[CaseRun]:
    """Returns the runs in order of value; the case without these keys has run before."""
    options = {"warmup": 1, "windows": 1, "steps": 2} if small else {"warmup": 3, "windows": 2, "steps": 3}
    return [
        CaseRun(case, model, seconds=_SMALL_S if small else _SECONDS[name], options=options)
        for name, case in _CASES.items()
    ]


def of_keys(records: Sequence[Record]) -> list[Record]:
    """Returns the records of :func:`plan`."""
    return [record for record in records if record.name in _CASES]


def device_states(figures: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the bytes of model states on the device, and those by the formula."""
    kinds = [kind for kind in figures["formula"] if kind not in figures["host_kinds"]]
    return sum(figures["model_states"][kind] for kind in kinds), sum(figures["formula"][kind] for kind in kinds)


def failures(records: Sequence[Record], target: float) -> list[str]:
    """Returns a line if the states that ``offload=cpu`` leaves on the device exceed ``target`` of the formula."""
    for record in records:
        if record.name == OFFLOAD and record.figures is not None:
            held, formula = device_states(record.figures)
            if held > target * formula:
                return [f"{OFFLOAD}: model states on the device are {held / formula:.3f} of the formula"]
    return []


def conclusions(records: Sequence[Record]) -> list[str]:
    """Returns a line for recomputation, and one for offload; ``records[0]`` is the case without these keys."""
    found = {record.name: record for record in records if record.figures is not None}
    if not records or records[0].name not in found:
        return []
    baseline, lines = records[0], []
    recomputed = [
        f"{name} {_activations(found[name])} at {_step(found[name], baseline):.2f} x the step"
        for name in (SELECTIVE, FULL)
        if name in found
    ]
    if recomputed:
        shape = f"{baseline.model}, {baseline.micro_batch} sequences"
        lines.append(f"Recomputation, {shape}: activations {_activations(baseline)}; {'; '.join(recomputed)}.")
    if OFFLOAD in found:
        figures = found[OFFLOAD].figures or {}
        held, formula = device_states(figures)
        lines.append(
            f"G5, {OFFLOAD}, {baseline.model}: {size(held)} of states on the device, {held / formula:.3f} of the "
            f"formula, at {_step(found[OFFLOAD], baseline):.2f} x the step."
        )
    return lines


def section(records: Sequence[Record]) -> list[str]:
    """Returns the table; ``records[0]`` is the case without these keys."""
    rows = [record for record in records if record.figures is not None]
    if len(rows) < 2 or rows[0] is not records[0]:
        return []
    columns: list[Column[Record]] = [
        ("case", lambda row: row.name),
        ("micro-batch", lambda row: str(row.micro_batch)),
        ("ms a step", lambda row: spread(window_ms([row]), 1)),
        ("step / first", lambda row: f"{_step(row, rows[0]):.2f}"),
        ("activations", _activations),
        ("peak GiB", lambda row: gib([row], "peak_allocated")),
        ("at rest GiB", lambda row: gib([row], "at_rest")),
        ("states on the device", _states),
    ]
    title = f"Recomputation and offload, {rows[0].model}, {MODELS[rows[0].model].max_seq_len:,} tokens a sequence:"
    return ["", title, "", Table.of("Keys", columns, rows).markdown(), "", _NOTES]


def size(nbytes: int) -> str:
    """Formats bytes in GiB, or in MiB if they are less than one."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


def _activations(record: Record) -> str:
    nbytes = (record.figures or {}).get("activations")
    return "not measured" if nbytes is None else size(nbytes)


def _states(record: Record) -> str:
    held, formula = device_states(record.figures or {})
    return f"{size(held)} = {held / formula:.3f} x {size(formula)}"


def _step(record: Record, baseline: Record) -> float:
    return baseline.tokens_per_s / record.tokens_per_s
