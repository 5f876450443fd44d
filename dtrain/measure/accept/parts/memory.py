"""Memory: model states against the formula, and what the loss head takes beside its gradients."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dtrain
from dtrain.config.model import ModelConfig
from dtrain.config.precision import Float8
from dtrain.device import repeated_ms
from dtrain.measure.accept.job import Request
from dtrain.measure.accept.models import MODELS
from dtrain.measure.bench.training.model import build_on
from dtrain.models.linear_cross_entropy import linear_cross_entropy
from dtrain.precision.policy import PrecisionPolicy
from dtrain.telemetry.texts import compact
from dtrain.tools.processes import failure_reason
from dtrain.tools.tables import Column, Table

_PRECISIONS = ("bf16", "fp8", "fp32")
_SIZE_OF_STATES = "50M"
_HEAD_BUDGET_S = 1.0
_HEAD_NOTE = (
    "The loss head alone: output layer, cross entropy and their backward by chunks of tokens. Its gradients are those "
    "of hidden states and weight, in FP32. It runs twice, because cuBLAS takes its workspace in the first run. Full "
    "logits: the same compiled by `torch.compile`, all tokens at once."
)


def run(request: Request) -> Iterator[dict[str, Any]]:
    """Measures ``options["what"]``: ``head``, on a GPU, or ``states``."""
    results: dict[str, Any] = {"failures": [], "left_out": {}, "states": []}
    device = torch.device(request.device, 0) if request.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if request.options["what"] == "states":
        yield from _measure_states(request, device, results)
    elif device.type == "cpu":
        yield results | {"left_out": {"loss head": "memory is measured on a GPU"}}
    else:
        config = MODELS["50M" if request.small else "1.2B"]
        measure_head(config, 2, device)
        results["head"] = measure_head(config, 2, device)
        yield results
        yield results | {"head": results["head"] | _head_times(config, 2, device)}


def _measure_states(request: Request, device: torch.device, results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Adds ``states``: what engines of each stage and precision hold, against the formula."""
    deadline = time.monotonic() + request.seconds
    config = MODELS["tiny" if request.device == "cpu" else _SIZE_OF_STATES]
    for precision in _PRECISIONS:
        for stage in range(4):
            label = f"states, {precision}, stage {stage}"
            if time.monotonic() > deadline:
                results["left_out"][label] = "no time left"
                continue
            try:
                results["states"].append(_states(config, stage, precision, device))
            except Exception as error:  # one case must not cost the others
                results["failures"].append(f"{label}: {failure_reason(error)}")
            gc.collect()  # engines and models refer to each other
            yield results
    yield results  # with what was left out


def _states(config: ModelConfig, stage: int, precision: str, device: torch.device) -> dict[str, Any]:
    before = _allocated(device)
    model = build_on(device, config, seed=0)
    # not timed: which products are fast is a question of the steps
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
    x, weight, targets = _head_operands(config, micro_batch, device)
    before = _allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    linear_cross_entropy(x, weight, targets).backward()
    torch.cuda.synchronize(device)
    return {
        "micro_batch": micro_batch,
        "peak": torch.cuda.max_memory_allocated(device) - before,
        "gradients": x.nbytes + 4 * weight.numel(),  # the weight's is summed in FP32
        "full_logits": 4 * micro_batch * config.max_seq_len * weight.shape[0],
    }


def _head_operands(config: ModelConfig, micro_batch: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    assert config.vocab_size is not None, config
    options: Any = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    x = torch.randn(micro_batch, config.max_seq_len, config.hidden_dim, **options)
    weight = torch.randn(config.vocab_size, config.hidden_dim, **options)
    return x, weight, torch.randint(config.vocab_size, x.shape[:2], device=device)


def _head_times(config: ModelConfig, micro_batch: int, device: torch.device) -> dict[str, list[float]]:
    x, weight, targets = _head_operands(config, micro_batch, device)

    def full(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float().flatten(0, 1), targets.flatten())

    compiled: Any = torch.compile(full)
    own = repeated_ms(lambda: linear_cross_entropy(x, weight, targets).backward(), device, budget_s=_HEAD_BUDGET_S)
    x.grad = weight.grad = None
    other = repeated_ms(lambda: compiled(x, weight, targets).backward(), device, budget_s=_HEAD_BUDGET_S)
    return {"ms": own, "full_ms": other}


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def section(results: Mapping[str, Any]) -> list[str]:
    """Returns the table of the states, or the figures of the head."""
    columns: list[Column[Mapping[str, Any]]] = [
        ("precision", lambda row: row["precision"]),
        ("stage", lambda row: str(row["stage"])),
        ("held MiB", lambda row: _mib(_held(row))),
        ("formula MiB", lambda row: _mib(sum(row["formula"].values()))),
        ("held / formula", lambda row: f"{row['ratio']:.4f}"),
        ("bytes a parameter", lambda row: f"{_held(row) / row['num_parameters']:.2f}"),
        ("allocated MiB", lambda row: _mib(row["allocated"]) if row["allocated"] else "not measured"),
    ]
    if states := results["states"]:
        title = f"Model states of {compact(states[0]['num_parameters'])} parameters on one rank:"
        return [title, "", Table.of("States", columns, states).markdown()]
    return [*conclusions(results), "", _HEAD_NOTE] if "head" in results else []


def conclusions(results: Mapping[str, Any]) -> list[str]:
    """Returns a line for the states, or one for the head."""
    if states := results["states"]:
        worst = max(states, key=lambda row: row["ratio"])
        where = f"stage {worst['stage']} in {worst['precision']}"
        return [f"model states at most {worst['ratio']:.3f} of the formula, at {where}"]
    if head := results.get("head"):
        text = f"the loss head takes {head['peak'] / 2**30:.2f} GiB at {head['micro_batch']} sequences, beside its "
        text += f"gradients {head_share(head):.1%} of full FP32 logits"
        return [text + (f", at {head_speed(head):.2f} x the speed of compiled full logits" if "ms" in head else "")]
    return []


def head_share(head: Mapping[str, Any]) -> float:
    """Returns the memory beside the gradients over that of full FP32 logits."""
    return float((head["peak"] - head["gradients"]) / head["full_logits"])


def head_speed(head: Mapping[str, Any]) -> float:
    """Returns the time of compiled full logits over the head's."""
    return float(median(head["full_ms"]) / median(head["ms"]))


def _held(row: Mapping[str, Any]) -> int:
    return sum(size for kind, size in row["memory"].items() if kind in row["formula"])


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f}"
