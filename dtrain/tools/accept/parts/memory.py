"""Part f: model states against the formula (G5), memory of a step, the largest micro-batch, and the loss head (G6).

Then what recomputation and offload save, and what they cost.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import dtrain
from dtrain.config.blocks import Blocks
from dtrain.config.model import ModelConfig
from dtrain.config.precision import Float8
from dtrain.models.linear_cross_entropy import linear_cross_entropy
from dtrain.precision.policy import PrecisionPolicy
from dtrain.telemetry.texts import compact
from dtrain.tools.accept.part import PartRequest, save_partial
from dtrain.tools.accept.parts import memory_keys
from dtrain.tools.accept.parts.case_model import build_on
from dtrain.tools.accept.parts.interleaved import (
    CaseRun,
    InterleavedRuns,
    Record,
    dtrain_case,
    error_lines,
    records_of,
)
from dtrain.tools.accept.parts.models import MODELS
from dtrain.tools.ranks import failure_reason
from dtrain.tools.tables import Column, Table

STATE_TARGET, HEAD_TARGET = 1.02, 0.05
"""G5: model states over the formula. G6: memory of the loss head beside its gradients over that of full FP32 logits."""

_CASE = "dtrain, eager"
_PRECISIONS = ("bf16", "fp8", "fp32")
_ATTEMPTS, _SMALL_ATTEMPTS = 6, 2
_SEARCHES = 4  # further processes if the predicted micro-batch does not fit
_STATES_S = 30.0
_SIZE_OF_STATES = "50M"
_HEAD_STEP_S = 5.0
_NOTES = (
    "At rest: allocated between two steps. Peak: highest in steps after warm-up. Reserved: peak with the free blocks "
    "of the allocator. Largest micro-batch: predicted from the memory of one sequence, then tried one by one in steps "
    "until the device is out of memory. The loss head is measured alone at the same shape: output layer, cross "
    "entropy and their backward by chunks of tokens; its gradients are those of hidden states and weight, in FP32."
)


def run(request: PartRequest) -> dict[str, Any]:
    """Measures a step and the largest micro-batch, the loss head, the states, and the keys that take less memory."""
    runs = InterleavedRuns(request, (2, 1))
    results = runs.results
    name = "tiny" if request.small else "1.2B"
    runs.run([_step_run(name, 0, small=request.small)])
    _search_below(runs, name)
    device = torch.device(request.device, 0) if request.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    results["failures"] = error_lines(runs.records[:1])
    micro_batch = runs.micro_batch(name)
    if device.type == "cpu":
        results["left_out"]["peaks, fragments, loss head"] = "memory is measured on a GPU"
    elif micro_batch is not None and runs.seconds_left > _HEAD_STEP_S:
        results["head"] = _guarded(results, "loss head", lambda: measure_head(MODELS[name], micro_batch, device))
    save_partial(request, results)
    _measure_states(request, runs, device)
    if micro_batch is not None:
        runs.run(memory_keys.plan(name, small=request.small))
        saved = memory_keys.of_keys(runs.records)
        results["failures"] += error_lines(saved) + ([] if request.small else memory_keys.failures(saved, STATE_TARGET))
    return results | {"conclusions": conclusions(results)}


def _step_run(name: str, number: int, *, small: bool, attempts: int = 0, first: int | None = None) -> CaseRun:
    attempts = attempts or (_SMALL_ATTEMPTS if small else _ATTEMPTS)
    options: dict[str, Any] = {"warmup": 3, "windows": 1, "steps": 3, "attempts": attempts, "first_attempt": first}
    case = replace(dtrain_case(_CASE), blocks=Blocks())  # whose activations are measured
    return CaseRun(case, name, number, 8.0 if small else 40.0, options)


def _search_below(runs: InterleavedRuns, name: str) -> None:
    """Tries smaller micro-batches, each in a process of its own, if the predicted largest one does not fit."""
    for number in range(1, _SEARCHES + 1):
        last = _step_records(runs.records)[-1].figures
        if last is None or last["fitted"] or last["failed"] is None or last["failed"] <= last["micro_batch"]:
            return
        runs.run([_step_run(name, number, small=False, attempts=1, first=last["failed"] - 1)])


def largest_micro_batch(records: Sequence[Record]) -> tuple[int, int | None]:
    """Returns the largest micro-batch that fits, and the smallest that does not, if any was found."""
    figures = [record.figures for record in _step_records(records) if record.figures is not None]
    fitted = [size for values in figures for size in [values["micro_batch"], *values["fitted"]]]
    failed = [values["failed"] for values in figures if values["failed"] is not None]
    return max(fitted, default=0), min(failed, default=None)


def _step_records(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.name == _CASE]


def _measure_states(request: PartRequest, runs: InterleavedRuns, device: torch.device) -> None:
    """Adds ``states``: what engines of each stage and precision hold, against the formula."""
    results = runs.results
    config = MODELS["tiny" if request.small else _SIZE_OF_STATES]
    results["states"] = []
    for precision in _PRECISIONS:
        for stage in range(4):
            label = f"states, {precision}, stage {stage}"
            if runs.seconds_left <= 0:
                results["left_out"][label] = "no time left"
                continue
            found = _guarded(
                results, label, lambda stage=stage, precision=precision: _states(config, stage, precision, device)
            )
            if found is not None:
                results["states"].append(found)
                save_partial(request, results)
    # a small model is mostly padding
    too_much = [] if request.small else [found for found in results["states"] if found["ratio"] > STATE_TARGET]
    results["failures"] += [
        f"{found['precision']}, stage {found['stage']}: model states are {found['ratio']:.3f} of the formula"
        for found in too_much
    ]


def _states(config: ModelConfig, stage: int, precision: str, device: torch.device) -> dict[str, Any]:
    before = _allocated(device)
    model = build_on(device, config, seed=0)
    # not timed: which products are fast is part e's question
    float8 = Float8(choice="all")
    policy = PrecisionPolicy.named(precision, float8=float8) if precision == "fp8" else precision
    engine = dtrain.initialize(model, precision=policy, zero_stage=stage, seed=0)
    memory, formula = engine.memory(), engine.memory_formula()
    assert formula is not None, engine
    held = {kind: size for kind, size in memory.items() if kind in formula}
    _collect(device)
    return {
        "precision": precision,
        "stage": stage,
        "num_parameters": engine.num_parameters,
        "memory": memory,
        "formula": formula,
        "ratio": sum(held.values()) / sum(formula.values()),
        "allocated": _allocated(device) - before,
    }


def measure_head(config: ModelConfig, micro_batch: int, device: torch.device) -> dict[str, Any]:
    """Returns the highest memory of output layer, loss and their backward, of which gradients, and of FP32 logits."""
    assert config.vocab_size is not None, config
    tokens = micro_batch * config.max_seq_len
    x = torch.randn(micro_batch, config.max_seq_len, config.hidden_dim, device=device, dtype=torch.bfloat16)
    weight = torch.randn(config.vocab_size, config.hidden_dim, device=device, dtype=torch.bfloat16)
    targets = torch.randint(config.vocab_size, x.shape[:2], device=device)
    for tensor in (x, weight):
        tensor.requires_grad_()
    before = _allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    linear_cross_entropy(x, weight, targets).backward()
    torch.cuda.synchronize(device)
    return {
        "micro_batch": micro_batch,
        "peak": torch.cuda.max_memory_allocated(device) - before,
        "gradients": x.nbytes + 4 * weight.numel(),  # the weight's is summed in FP32
        "full_logits": 4 * tokens * config.vocab_size,
    }


def _guarded(results: dict[str, Any], label: str, measure: Any) -> dict[str, Any] | None:
    """Returns the result of ``measure``; its failure becomes a line of the results."""
    try:
        found: dict[str, Any] = measure()
    except Exception as error:  # one case must not cost the others
        results["failures"].append(f"{label}: {failure_reason(error)}")
        return None
    finally:
        gc.collect()  # engines and models refer to each other
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return found


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


# -- the page ----------------------------------------------------------------------------------------------------------


def section(results: Mapping[str, Any]) -> list[str]:
    """Returns the tables of a step and of the states."""
    records = records_of(results)
    steps = [record for record in records[:1] if record.figures is not None]
    lines = [*conclusions(results)]
    if steps and steps[0].figures is not None and steps[0].figures["available"]:
        lines += ["", Table("Step", ("memory of a step", "GiB"), _step_rows(steps[0], results)).markdown(), "", _NOTES]
    columns: list[Column[Mapping[str, Any]]] = [
        ("precision", lambda row: row["precision"]),
        ("stage", lambda row: str(row["stage"])),
        ("held MiB", lambda row: _mib(_held(row))),
        ("formula MiB", lambda row: _mib(sum(row["formula"].values()))),
        ("held / formula", lambda row: f"{row['ratio']:.4f}"),
        ("bytes a parameter", lambda row: f"{_held(row) / row['num_parameters']:.2f}"),
        ("allocated MiB", lambda row: _mib(row["allocated"]) if row["allocated"] else "not measured"),
    ]
    if states := results.get("states"):
        title = f"Model states of {compact(states[0]['num_parameters'])} parameters on one rank:"
        lines += ["", title, "", Table.of("States", columns, states).markdown()]
    return lines + memory_keys.section([*records[:1], *memory_keys.of_keys(records)])


def conclusions(results: Mapping[str, Any]) -> list[str]:
    """Returns lines for G5, the largest micro-batch, G6, recomputation and offload."""
    lines = []
    if states := results.get("states"):
        worst = max(states, key=lambda row: row["ratio"])
        lines.append(
            f"G5: model states at most {worst['ratio']:.3f} of the formula, at stage {worst['stage']} in "
            f"{worst['precision']} (target {STATE_TARGET:g})."
        )
    records = records_of(results)
    if any(record.figures is not None and record.figures["available"] for record in records):
        largest, failed = largest_micro_batch(records)
        model, limit = records[0].model, f"{failed} does not" if failed else "more was not tried"
        tokens = MODELS[model].max_seq_len
        lines.append(f"Largest micro-batch in BF16, {model}, eager: {largest} sequences of {tokens:,} ({limit}).")
    if head := results.get("head"):
        figures = records[0].figures or {}
        same = figures.get("micro_batch") == head["micro_batch"] and figures["peak_allocated"]
        of_peak = f", {head['peak'] / figures['peak_allocated']:.0%} of the peak of a step" if same else ""
        lines.append(
            f"G6: the loss head takes {head['peak'] / 2**30:.2f} GiB at {head['micro_batch']} sequences, "
            f"beside its gradients {(head['peak'] - head['gradients']) / head['full_logits']:.1%} of full FP32 logits "
            f"(target {HEAD_TARGET:.0%}){of_peak}."
        )
    lines += memory_keys.conclusions([*records[:1], *memory_keys.of_keys(records)])
    return lines or ["G5, G6: not measured."]


def _step_rows(record: Record, results: Mapping[str, Any]) -> list[tuple[str, str]]:
    figures = record.figures
    assert figures is not None
    unused = figures["peak_reserved"] - figures["peak_allocated"]
    states = sum(size for kind, size in figures["model_states"].items())
    rows = {
        f"model states, {compact(figures['num_parameters'])} parameters": states,
        "at rest": figures["at_rest"],
        f"peak allocated, micro-batch {figures['micro_batch']}": figures["peak_allocated"],
        "peak reserved": figures["peak_reserved"],
        "one sequence": figures["per_sequence"],
        "available to this process": figures["available"],
    }
    if head := results.get("head"):
        rows |= {"loss head": head["peak"], "full FP32 logits": head["full_logits"]}
    return [
        *((name, f"{size / 2**30:.2f}") for name, size in rows.items()),
        ("reserved but unused at the peak", f"{unused / 2**30:.2f} ({unused / max(1, figures['peak_reserved']):.1%})"),
    ]


def _held(row: Mapping[str, Any]) -> int:
    return sum(size for kind, size in row["memory"].items() if kind in row["formula"])


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f}"
