"""``dtrain bench profile``: the time of a training step by class of kernel, and the optimizer phase in it.

The phase is ``engine.step()`` after a backward, as a training loop calls it: norm and overflow check, vote, unscale,
clip, update and cast.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import record_function

from dtrain.config.engines import Native
from dtrain.config.precision import PrecisionConfig
from dtrain.config.schedule import Constant
from dtrain.config.schema import RunConfig, TrainConfig
from dtrain.config.tool_schema import ProfileBenchConfig, ProfileSuite
from dtrain.device import repeated_ms, synchronize
from dtrain.distributed.startup.setup import choose_device, connect, ensure_process_group
from dtrain.measure.bench.records import TableResults
from dtrain.measure.bench.training.model import build_on
from dtrain.measure.bench.training.part_times import PartTimes
from dtrain.measure.bench.training.trace import CLASSES, OPTIMIZER, record_trace
from dtrain.measure.record import head
from dtrain.precision.hardware import has_compiler, has_float8_tensor_cores
from dtrain.telemetry.throughput import device_name
from dtrain.tools.processes import failure_reason
from dtrain.tools.tables import Table
from dtrain.train.session import Session, StepWatch
from dtrain.train.setup import make_engine, torch_settings_restored

COUNTED_BYTES = 30
"""Bytes a parameter that an update must move: BF16 gradient read twice, master and moments read and written, BF16
weight written."""

_TOP = 20
_COPY_NUMEL = 1 << 28
_DESCRIPTION = (
    "The native engine, {model}, sequences of {length:,} tokens, one rank of {device}. A class is chosen by the "
    "kernel's name; kernels that `engine.step` launches count as optimizer unless they communicate. Kernels that "
    "overlap count in full. Idle: the step less the time in which the device executes anything; the profiler slows the "
    "host, so compare the step without it. Optimizer phase: `engine.step()` between two events of the device, without "
    "the profiler. Of the copy: its bytes a second over those of an FP32 copy, first with {counted} bytes a parameter, "
    "as for BF16 gradients, then with those that this engine moves."
)


def run_profile_suite(config: ProfileSuite[ProfileBenchConfig], command: str) -> Iterator[TableResults]:
    """Profiles a step in each of ``bench.precisions``; ``bench.keep_trace`` keeps the raw traces in that folder."""
    device = choose_device(config.bench.device, 0)
    if device.type == "cuda":
        ensure_process_group(device)
    description = _DESCRIPTION.format(
        model=config.model.name, length=config.model.max_seq_len, device=device_name(device), counted=COUNTED_BYTES
    )
    header = head(command, config)
    results = TableResults(suite="profile", **header, description=description, tables=[], conclusions=[], rows=[])
    for precision in config.bench.precisions:
        if precision == "fp8" and not has_float8_tensor_cores(device):
            results.left_out[precision] = "no FP8 Tensor Cores"
        elif config.model.compile != "none" and not has_compiler(device):
            results.left_out[precision] = "no compiler"
        else:
            _measure(config, precision, config.bench.micro_batch_size, device, results)
        yield _with_tables(results)


def _measure(
    config: ProfileSuite[ProfileBenchConfig],
    precision: str,
    micro_batch: int,
    device: torch.device,
    results: TableResults,
) -> None:
    """Appends the figures of a case; with less memory than it needs, those of half the micro-batch."""
    smaller = False
    try:
        with torch_settings_restored():
            results.rows.append(_profile(config, precision, micro_batch, device))
    except torch.OutOfMemoryError as error:
        smaller = micro_batch > 1
        if not smaller:
            results.left_out[precision] = failure_reason(error)
    except Exception as error:  # such as a kernel that cannot be compiled; the other cases still run
        traceback.print_exc()
        results.failures.append(f"{precision}: {failure_reason(error)}")
    gc.collect()  # outside the handlers, because the error holds the frames, and they hold the tensors
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if smaller:
        _measure(config, precision, micro_batch // 2, device, results)


class _Phase(StepWatch):
    """Times the optimizer phase of each step, on the host and by events on a GPU, and names it for the profiler."""

    def __init__(self, device: torch.device) -> None:
        self.times, self.host_times = PartTimes(device), PartTimes(torch.device("cpu"))

    @contextmanager
    def update(self) -> Iterator[None]:
        with self.host_times.update(), record_function(OPTIMIZER), self.times.update():
            yield


def _profile(
    config: ProfileSuite[ProfileBenchConfig], precision: str, micro_batch: int, device: torch.device
) -> dict[str, Any]:
    bench, model = config.bench, config.model
    run = RunConfig(
        seed=config.seed,
        train=TrainConfig(micro_batch_size=micro_batch, global_batch_size=micro_batch),
        engine=Native(zero_stage=bench.zero_stage),
        precision=PrecisionConfig(name=precision),
        model=model,
        optim=config.optim,
        schedule=Constant(warmup_steps=0),
    )
    engine = make_engine(run, build_on(device, model, config.seed), connect(device))
    session, generator = Session(engine, run), torch.Generator(device).manual_seed(0)
    shape = (micro_batch, model.max_seq_len + 1)
    tokens = torch.randint(model.vocab_size or 1, shape, generator=generator, device=device)
    batch = [{"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}]
    phase = _Phase(device)
    for _ in range(bench.warmup_steps):
        session.step(batch)
    step_ms, phase_ms, host_ms = [], [], []
    for _ in range(bench.steps):
        synchronize(device)
        begin = time.perf_counter()
        session.step(batch, watch=phase)  # nothing reads its outcome, which would wait for the device
        synchronize(device)
        step_ms.append(1000 * (time.perf_counter() - begin))
        phase_ms.append(phase.times.take()["update"])
        host_ms.append(phase.host_times.take()["update"])
    keep = Path(bench.keep_trace) / f"{precision}.json" if bench.keep_trace else None
    if keep is not None:
        keep.parent.mkdir(parents=True, exist_ok=True)
    trace = record_trace(lambda: session.step(batch, watch=_Phase(device)), device, keep=keep)
    part = trace.within(OPTIMIZER)
    copy_gb_per_s = _copy_gb_per_s(min(_COPY_NUMEL, engine.num_parameters), device)
    moved = _moved_bytes(engine.memory())
    return {
        "precision": precision,
        "micro_batch": micro_batch,
        "num_parameters": engine.num_parameters,
        "step_ms": step_ms,
        **trace.summary(_TOP),
        "is_on_device": trace.is_on_device,
        "optimizer": {
            "ms": phase_ms,
            "host_ms": host_ms,
            "bytes": moved,
            "copy_gb_per_s": copy_gb_per_s,
            "copy_share": copy_share(phase_ms, COUNTED_BYTES * engine.num_parameters, copy_gb_per_s),
            "copy_share_moved": copy_share(phase_ms, moved, copy_gb_per_s),
            **part.summary(_TOP),
        },
    }


def _moved_bytes(memory: Mapping[str, int]) -> int:
    """Returns the bytes that the phase moves: gradients twice (norm, update), states in and out, replicas out."""
    states = memory["master"] + memory["moments"]
    return 2 * memory["main_grad"] + 2 * states + memory["compute"]


def _copy_gb_per_s(numel: int, device: torch.device) -> float:
    source, target = torch.randn(numel, device=device), torch.empty(numel, device=device)  # zeros are copied faster
    return 2 * source.nbytes / median(repeated_ms(lambda: target.copy_(source), device)) / 1e6


# -- the report --------------------------------------------------------------------------------------------------------


def copy_share(phase_ms: Sequence[float], nbytes: float, copy_gb_per_s: float) -> float:
    """Returns the bytes a second of a phase that moves ``nbytes`` over the copy's."""
    return float(nbytes / median(phase_ms) / 1e6 / copy_gb_per_s)


def outside(row: Mapping[str, Any]) -> float:
    """Returns the share of the step that is neither matmul nor attention, idle time included."""
    inside = row["ms_by_class"]["matmul"] + row["ms_by_class"]["attention"]
    return float(max(0.0, 1 - inside / row["wall_ms"]))


def calls(row: Mapping[str, Any]) -> str:
    """Returns where the host waits, in words."""
    return ", ".join(f"{count} {name}" for name, count in row["synchronizations"].items()) or "0"


def _with_tables(results: TableResults) -> TableResults:
    rows = results.rows
    if not rows:
        return results
    lines: list[tuple[str, list[str]]] = [
        (name, [_ms(row["ms_by_class"][name], row["wall_ms"]) for row in rows])
        for name in CLASSES
        if any(row["ms_by_class"][name] for row in rows)
    ]
    phases = [row["optimizer"] for row in rows]
    lines += [
        ("idle", [_ms(row["idle_ms"], row["wall_ms"]) for row in rows]),
        ("profiled step", [f"{row['wall_ms']:.2f}" for row in rows]),
        ("step without profiler", [f"{median(row['step_ms']):.2f}" for row in rows]),
        ("outside matmul and attention", [f"{outside(row):.0%}" for row in rows]),
        ("kernel launches", [str(row["num_launches"]) for row in rows]),
        ("copies and fills", [str(row["num_copies"]) for row in rows]),
        ("host synchronizations", [calls(row) for row in rows]),
        ("optimizer phase", [f"{median(phase['ms']):.3f}" for phase in phases]),
        (f"of the copy, at {COUNTED_BYTES} bytes", [f"{phase['copy_share']:.1%}" for phase in phases]),
        (
            "of the copy, at its bytes",
            [f"{row['optimizer']['copy_share_moved']:.1%} at {_bytes_a_parameter(row):.1f}" for row in rows],
        ),
        ("host ms in it", [f"{median(phase['host_ms']):.2f}" for phase in phases]),
        ("launches in it", [str(phase["num_launches"]) for phase in phases]),
        ("copies and fills in it", [str(phase["num_copies"]) for phase in phases]),
        ("synchronizations in it", [calls(phase) for phase in phases]),
    ]
    titles = [f"{row['precision']}, {row['micro_batch']} sequences" for row in rows]
    first = Table("Profile", ("ms", *titles), [(name, *cells) for name, cells in lines])
    tops = [_top(f"{row['precision']}: the kernels that take most time", row["top"]) for row in rows]
    tops += [_top(f"{row['precision']}: those of the optimizer phase", row["optimizer"]["top"]) for row in rows]
    return replace(results, tables=[first, *tops], conclusions=[_conclusion(row) for row in rows])


def _conclusion(row: Mapping[str, Any]) -> str:
    ms, wall, phase = row["ms_by_class"], row["wall_ms"], row["optimizer"]
    most = sorted((*ms.items(), ("idle", row["idle_ms"])), key=lambda item: -item[1])[:4]
    shares = ", ".join(f"{name} {value / wall:.0%}" for name, value in most)
    unit = "launches" if row["is_on_device"] else "operations"
    return (
        f"{row['precision']}, step {median(row['step_ms']):.1f} ms: {shares}; outside matmul and attention "
        f"{outside(row):.0%}; optimizer phase {median(phase['ms']):.2f} ms, {phase['copy_share']:.1%} of the copy's "
        f"bandwidth at {COUNTED_BYTES} bytes a parameter, {phase['num_launches']} {unit}, host synchronizations "
        f"{calls(phase)}"
    )


def _bytes_a_parameter(row: Mapping[str, Any]) -> float:
    return float(row["optimizer"]["bytes"] / row["num_parameters"])


def _top(title: str, kernels: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        (f"`{kernel['name'][:90]}`".replace("|", "/"), kernel["class"], str(kernel["calls"]), f"{kernel['ms']:.3f}")
        for kernel in kernels
    ]
    return Table(title, ("kernel", "class", "calls", "ms"), rows)


def _ms(value: float, wall: float) -> str:
    return f"{value:.2f} ({value / wall:.0%})"
