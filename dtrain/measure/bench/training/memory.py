"""``dtrain bench memory``: the model states of the native engine by precision and stage, against the ZeRO formula."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtrain.config.engines import Native
from dtrain.config.precision import Float8, PrecisionConfig
from dtrain.config.schema import RunConfig
from dtrain.config.tool_schema import MemoryBenchConfig, ModelSuite
from dtrain.distributed.startup.setup import choose_device, connect
from dtrain.measure.bench.records import TableResults
from dtrain.measure.bench.training.model import build_on
from dtrain.measure.record import head
from dtrain.telemetry.texts import compact
from dtrain.tools.processes import failure_reason
from dtrain.tools.tables import Column, Table
from dtrain.train.setup import make_engine

_DESCRIPTION = (
    "Model states of {parameters} parameters on one rank of {device}. Held: the tensors of the kinds that the formula "
    "has. Allocated: what torch's allocator has more than before."
)


def run_memory_suite(config: ModelSuite[MemoryBenchConfig], command: str) -> Iterator[TableResults]:
    """Builds the engine in each precision at each stage; one that fails costs no other."""
    device = choose_device(config.bench.device, 0)
    results = TableResults(suite="memory", **head(command, config), description="", tables=[], conclusions=[], rows=[])
    for precision in config.bench.precisions:
        for stage in config.bench.stages:
            try:
                results.rows.append(_states(config, precision, stage, device))
            except Exception as error:  # one case must not cost the others
                results.failures.append(f"states, {precision}, stage {stage}: {failure_reason(error)}")
            gc.collect()  # engines and models refer to each other
            yield _with_table(results, device)


def _states(config: ModelSuite[MemoryBenchConfig], precision: str, stage: int, device: torch.device) -> dict[str, Any]:
    before = _allocated(device)
    # not timed: which products are fast is a question of the steps
    policy = PrecisionConfig(precision, float8=Float8(choice="all") if precision == "fp8" else Float8())
    run = RunConfig(model=config.model, engine=Native(zero_stage=stage), precision=policy)
    engine = make_engine(run, build_on(device, config.model, run.seed), connect(device))
    memory, formula = engine.memory(), engine.memory_formula()
    assert formula is not None, engine
    held = sum(size for kind, size in memory.items() if kind in formula)
    gc.collect()
    return {
        "precision": precision,
        "stage": stage,
        "num_parameters": engine.num_parameters,
        "memory": memory,
        "formula": formula,
        "held": held,
        "ratio": held / sum(formula.values()),
        "allocated": _allocated(device) - before,
    }


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def _with_table(results: TableResults, device: torch.device) -> TableResults:
    columns: list[Column[Mapping[str, Any]]] = [
        ("precision", lambda row: row["precision"]),
        ("stage", lambda row: str(row["stage"])),
        ("held MiB", lambda row: _mib(row["held"])),
        ("formula MiB", lambda row: _mib(sum(row["formula"].values()))),
        ("held / formula", lambda row: f"{row['ratio']:.4f}"),
        ("bytes a parameter", lambda row: f"{row['held'] / row['num_parameters']:.2f}"),
        ("allocated MiB", lambda row: _mib(row["allocated"]) if row["allocated"] else "not measured"),
    ]
    rows: Sequence[Mapping[str, Any]] = results.rows
    if not rows:
        return results
    worst = max(rows, key=lambda row: float(row["ratio"]))
    where = f"stage {worst['stage']} in {worst['precision']}"
    return replace(
        results,
        description=_DESCRIPTION.format(parameters=compact(rows[0]["num_parameters"]), device=device.type),
        tables=[Table.of("States", columns, rows)],
        conclusions=[f"model states at most {worst['ratio']:.3f} of the formula, at {where}"],
    )


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f}"
