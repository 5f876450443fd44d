"""Profile of a training step: its time by class of kernel, so that the next work is chosen from facts."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from dtrain.config.engines import Native
from dtrain.config.model import ModelConfig
from dtrain.config.optim import OptimConfig
from dtrain.config.precision import PrecisionConfig
from dtrain.config.schedule import Constant
from dtrain.config.schema import RunConfig, TrainConfig
from dtrain.distributed.startup.setup import connect, ensure_process_group
from dtrain.engine.interface import Engine
from dtrain.measure.accept.job import Request
from dtrain.measure.accept.models import MODELS
from dtrain.measure.accept.trace import CLASSES, OPTIMIZER, record_trace
from dtrain.measure.bench.training.model import build_on
from dtrain.precision.hardware import has_compiler, has_float8_tensor_cores
from dtrain.tools.processes import failure_reason
from dtrain.tools.tables import Table
from dtrain.train.setup import make_engine, torch_settings_restored

_WARMUP, _TIMED = 4, 5
_TOP = 20


@dataclass(frozen=True)
class ProfiledCase:
    """One training setup of the native engine."""

    precision: str
    is_compiled: bool
    is_chunked: bool = False

    @property
    def name(self) -> str:
        loss = ", chunked loss" if self.is_chunked else ""
        return f"{self.precision} {'compiled' if self.is_compiled else 'eager'}{loss}"


def run(request: Request) -> Iterator[dict[str, Any]]:
    """Profiles ``options["case"]`` at ``options["micro_batch"]``; ``keep_trace`` keeps the raw trace there."""
    device = torch.device(request.device, 0) if request.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        ensure_process_group(device)
    model = MODELS["tiny" if request.device == "cpu" else "50M" if request.small else "1.2B"]
    case = ProfiledCase(**request.options["case"])
    results: dict[str, Any] = {"model": model.name, "seq_len": model.max_seq_len}
    results |= {"cases": [], "left_out": {}, "failures": []}
    if case.precision == "fp8" and not has_float8_tensor_cores(device):
        results["left_out"][case.name] = "no FP8 Tensor Cores"
    elif case.is_compiled and not has_compiler(device):
        results["left_out"][case.name] = "no compiler"
    else:
        kept = request.options.get("keep_trace")
        _measure(case, model, request.options["micro_batch"], device, Path(kept) if kept else None, results)
    yield results


def _measure(
    case: ProfiledCase,
    model: ModelConfig,
    micro_batch: int,
    device: torch.device,
    keep: Path | None,
    results: dict[str, Any],
) -> None:
    """Appends the figures of a case; with less memory than it needs, those of half the micro-batch."""
    smaller = False
    try:
        with torch_settings_restored():
            results["cases"].append(_profile(case, model, micro_batch, device, keep))
    except torch.OutOfMemoryError as error:
        smaller = micro_batch > 1
        if not smaller:
            results["left_out"][case.name] = failure_reason(error)
    except Exception as error:  # such as a kernel that cannot be compiled; the other cases still run
        traceback.print_exc()
        results["failures"].append(f"{case.name}: {failure_reason(error)}")
    finally:  # outside the handler, because the error holds the frames, and they hold the tensors
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if smaller:
        gc.collect()
        _measure(case, model, micro_batch // 2, device, keep, results)


def _profile(
    case: ProfiledCase, model: ModelConfig, micro_batch: int, device: torch.device, keep: Path | None
) -> dict[str, Any]:
    config = RunConfig(
        train=TrainConfig(micro_batch_size=micro_batch, global_batch_size=micro_batch),
        engine=Native(),
        precision=PrecisionConfig(name=case.precision),
        model=replace(
            model,
            compile="blocks" if case.is_compiled else "none",
            loss_chunk="auto" if case.is_chunked else model.loss_chunk,
        ),
        optim=OptimConfig(lr=1e-4),
        schedule=Constant(warmup_steps=0),
    )
    engine = make_engine(config, build_on(device, model, config.seed), connect(device))
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(
        model.vocab_size or 1, (micro_batch, model.max_seq_len + 1), generator=generator, device=device
    )
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    step = _step_of(engine, batch)
    for _ in range(_WARMUP):
        step()
    step_ms = _step_ms(step, device)
    trace = record_trace(step, device, keep=keep)
    phase = trace.within(OPTIMIZER)
    own = {"name": case.name, "micro_batch": micro_batch, "tokens": tokens[:, 1:].numel(), "step_ms": step_ms}
    optimizer = {
        "busy_ms": phase.busy_ms,
        "num_launches": phase.num_launches,
        "num_copies": phase.num_copies,
        "synchronizations": phase.synchronizations,
    }
    return own | trace.summary(_TOP) | {"is_on_device": trace.is_on_device, "optimizer": optimizer}


def _step_of(engine: Engine, batch: dict[str, Tensor]) -> Callable[[], object]:
    def step() -> None:
        for micro_batch in engine.accumulate([batch]):
            engine.backward(engine(**micro_batch))
        with record_function(OPTIMIZER):
            engine.step()  # nothing reads its outcome, which would wait for the device

    return step


def _step_ms(step: Callable[[], object], device: torch.device) -> list[float]:
    times = []
    for _ in range(_TIMED):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1000 * (time.perf_counter() - begin))
    return times


def conclusions(results: Mapping[str, Any]) -> list[str]:
    lines = []
    for row in results["cases"]:
        ms, wall = row["ms_by_class"], row["wall_ms"]
        most = sorted((*ms.items(), ("idle", row["idle_ms"])), key=lambda item: -item[1])[:4]
        shares = ", ".join(f"{name} {value / wall:.0%}" for name, value in most)
        optimizer = row["optimizer"]
        lines.append(
            f"{results['model']}, {row['name']}, step {median(row['step_ms']):.1f} ms: {shares}; outside matmul and "
            f"attention {_outside(row):.0%}; optimizer phase {optimizer['num_launches']} "
            f"{'launches' if row['is_on_device'] else 'operations'}, {_waits(optimizer)} host synchronizations"
        )
    return lines


def _outside(row: Mapping[str, Any]) -> float:
    """Returns the share of the step that is neither matmul nor attention, idle time included."""
    inside = row["ms_by_class"]["matmul"] + row["ms_by_class"]["attention"]
    return float(max(0.0, 1 - inside / row["wall_ms"]))


def _waits(row: Mapping[str, Any]) -> int:
    return sum(row["synchronizations"].values())


def section(results: Mapping[str, Any]) -> list[str]:
    cases = results.get("cases") or []
    lines = [
        f"The native engine, {results.get('model')}, sequences of {results.get('seq_len')} tokens, stage 2, one rank; "
        "compiled: `model.compile=blocks`. A class is chosen by the kernel's name; kernels which `engine.step` "
        "launches count as optimizer unless they communicate. Kernels that overlap count in full, so classes and idle "
        "may add up to more than the step. Idle: the step less the time in which the device executes anything; the "
        "profiler slows the host, so compare the step without it.",
    ]
    if not cases:
        return lines
    if not cases[0]["is_on_device"]:
        lines += ["", "No device: operations of the CPU take the place of kernels."]
    titles = [f"{row['name']}, {row['micro_batch']} x {results['seq_len']}" for row in cases]
    rows = [
        (name, *(_ms(row["ms_by_class"][name], row["wall_ms"]) for row in cases))
        for name in CLASSES
        if any(row["ms_by_class"][name] for row in cases)
    ]
    rows += [
        ("idle", *(_ms(row["idle_ms"], row["wall_ms"]) for row in cases)),
        ("profiled step", *(f"{row['wall_ms']:.2f}" for row in cases)),
        ("step without profiler", *(f"{median(row['step_ms']):.2f}" for row in cases)),
        (
            "outside matmul and attention",
            *(f"{_outside(row):.0%}" for row in cases),
        ),
        ("kernel launches", *(str(row["num_launches"]) for row in cases)),
        ("copies and fills", *(str(row["num_copies"]) for row in cases)),
        ("host synchronizations", *(_calls(row) for row in cases)),
        (
            "launches in the optimizer phase",
            *(str(row["optimizer"]["num_launches"]) for row in cases),
        ),
        ("synchronizations there", *(_calls(row["optimizer"]) for row in cases)),
    ]
    lines += ["", Table("Profile", ("ms", *titles), rows).markdown()]
    for row in cases:
        top = [
            (f"`{kernel['name'][:90]}`".replace("|", "/"), kernel["class"], str(kernel["calls"]), f"{kernel['ms']:.3f}")
            for kernel in row["top"]
        ]
        lines += ["", f"{row['name']}, the {len(top)} kernels that take most time:", ""]
        lines.append(Table(row["name"], ("kernel", "class", "calls", "ms"), top).markdown())
    return lines


def _ms(value: float, wall: float) -> str:
    return f"{value:.2f} ({value / wall:.0%})"


def _calls(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {count}" for name, count in row["synchronizations"].items()) or "0"
