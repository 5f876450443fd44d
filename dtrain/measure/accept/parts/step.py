"""One run of a training case in a process of its own: builds it, warms up, times windows of steps.

A process for each run: two models of 3B parameters do not fit one GPU, and an error of one case, such as a failed
kernel, cannot reach the next.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from dtrain.config.blocks import Blocks
from dtrain.config.dump import from_plain
from dtrain.distributed.logging import logger
from dtrain.distributed.startup.setup import choose_device
from dtrain.engine.adapters.deepspeed.library import load
from dtrain.measure.accept.job import Request
from dtrain.measure.accept.models import count_flops
from dtrain.measure.accept.parts.case_model import Batches, build_on, compile_blocks
from dtrain.measure.bench.records import BenchmarkCase, LinearFormat, RankJob
from dtrain.measure.bench.training.worker import RankTraining, footprint, prepare_training, run_config
from dtrain.precision.hardware import has_float8_tensor_cores
from dtrain.telemetry.gpu import GPUState, describe_state
from dtrain.telemetry.throughput import device_name

_STEPS_OF_AN_ATTEMPT = 2  # the second meets the allocator as the first has left it


@dataclass(frozen=True)
class CaseJob:
    """Order of one process.

    Attributes:
        rank_job: case and configuration, as in ``dtrain bench``.
        micro_batch: sequences in a step.
        is_compiled: whether the model's blocks are compiled: dtrain's by ``model.compile=blocks``.
        warmup: steps before the first window.
        windows: number of timed windows.
        steps: steps of a window.
        is_text: whether the model trains on text; else on random tokens made on the device.
        attempts: number of further micro-batches to try at the end, each one sequence larger than the one before.
    """

    rank_job: RankJob
    micro_batch: int
    is_compiled: bool = False
    warmup: int = 3
    windows: int = 1
    steps: int = 10
    is_text: bool = False
    attempts: int = 0


@dataclass(frozen=True)
class CaseFigures:
    """Measurements of one run; memory is in bytes, and zero on a CPU.

    Attributes:
        device: its name.
        model_states: bytes by kind.
        formula: the same by the ZeRO formula; None for a peer.
        host_kinds: kinds of ``model_states`` that lie in the memory of the host beside a GPU.
        first_step_s: time of the first step at the micro-batch, with compilation.
        window_ms: milliseconds of a step, one number for each window.
        losses: of all steps at the micro-batch.
        at_rest: allocated between steps.
        peak_allocated: highest in the windows.
        peak_reserved: the same with the allocator's free blocks.
        available: memory that this process can have.
        flops_causal: FLOPs of a token, attention counted by its causal half.
        flops_full: the same with all of it.
        state: power limit and clocks while the windows ran; None on a CPU.
        graphs: graphs that were compiled.
        graph_breaks: number of graph breaks.
        warnings: of dtrain, such as the reason of a graph break.
        activations: bytes held from a forward to its backward, if they were measured.
        fitted: micro-batches that were tried at the end and fit.
        failed: the one that did not, if any did not.
        emulates_float8: whether FP8 products are computed in FP32.
    """

    device: str
    num_parameters: int
    micro_batch: int
    model_states: dict[str, int]
    formula: dict[str, int] | None
    setup_s: float
    first_step_s: float
    window_ms: list[float]
    losses: list[float]
    at_rest: int
    peak_allocated: int
    peak_reserved: int
    available: int
    flops_causal: float
    flops_full: float
    state: GPUState | None
    graphs: int
    graph_breaks: int
    warnings: list[str] = field(default_factory=list)
    host_kinds: list[str] = field(default_factory=list)
    activations: int | None = None
    linears: list[LinearFormat] = field(default_factory=list)
    fitted: list[int] = field(default_factory=list)
    failed: int | None = None
    emulates_float8: bool = False


def run(request: Request) -> Iterator[dict[str, Any]]:
    """Runs ``options["job"]``, the fields of a :class:`CaseJob`."""
    yield {"figures": asdict(measure(from_plain(CaseJob, request.options["job"])))}


def measure(job: CaseJob) -> CaseFigures:
    """Runs the job in this process."""
    rank_job = job.rank_job
    case = rank_job.case
    device = choose_device(rank_job.config["bench"]["device"], 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(rank_job.config["bench"]["threads_per_rank"])
    _connect_peer(case, device)
    start = time.perf_counter()
    training, batches = _prepare(job, device, is_compiled=job.is_compiled)
    _empty_cache(device)
    _synchronize(device)
    setup_s = time.perf_counter() - start
    with _kept_warnings() as warnings:
        num_steps = job.warmup + job.windows * job.steps
        batches.resize(job.micro_batch, num_steps)
        losses: list[Callable[[], float]] = []
        first_step_s = _seconds(lambda: losses.append(next(training.losses)), device)
        while len(losses) < job.warmup:
            losses.append(next(training.losses))
        _synchronize(device)
        _reset_peaks(device)
        state = _state_meanwhile(device)
        window_ms = [_window_ms(training, job.steps, device, losses) for _ in range(job.windows)]
        peaks = _peaks(device)
        at_rest = _allocated(device)
        held = footprint(training, device)
        graphs, breaks = _compiled_graphs() if job.is_compiled else (0, 0)
        if held.graphs is not None:
            graphs = held.graphs
        values = [loss() for loss in losses]
        fitted, failed = _attempt(job, batches, training, device)
    flops = count_flops(run_config(rank_job).model)
    return CaseFigures(
        device=device_name(device),
        num_parameters=held.num_parameters,
        micro_batch=job.micro_batch,
        model_states=held.state,
        formula=held.formula,
        setup_s=setup_s,
        first_step_s=first_step_s,
        window_ms=window_ms,
        losses=values,
        at_rest=at_rest,
        peak_allocated=peaks[0],
        peak_reserved=peaks[1],
        available=_available(device),
        flops_causal=flops.causal,
        flops_full=flops.full,
        state=state.result() if state is not None else None,
        graphs=graphs,
        graph_breaks=breaks,
        warnings=warnings,
        host_kinds=held.host_kinds,
        activations=held.activations,
        linears=held.linears,
        fitted=fitted,
        failed=failed,
        emulates_float8=case.precision == "fp8" and not has_float8_tensor_cores(device),
    )


def _prepare(job: CaseJob, device: torch.device, *, is_compiled: bool) -> tuple[RankTraining, Batches]:
    rank_job, case = job.rank_job, job.rank_job.case
    if is_compiled and case.is_dtrain:
        rank_job = replace(rank_job, case=replace(case, blocks=replace(case.blocks or Blocks(), compile="blocks")))
    config = run_config(rank_job)
    model = build_on(device, config.model, config.seed)
    if is_compiled and not case.is_dtrain:
        compile_blocks(model, wraps=case.engine.startswith("fsdp2"))
    batches = Batches(config, device, is_text=job.is_text)
    return prepare_training(rank_job, config, model, iter(batches), device), batches


def _state_meanwhile(device: torch.device) -> Future[GPUState] | None:
    """Returns what the driver says of the GPU while it computes: an idle one has other clocks."""
    if device.type != "cuda":
        return None
    return ThreadPoolExecutor(1).submit(describe_state, device.index or 0)


@contextmanager
def _kept_warnings() -> Iterator[list[str]]:
    """Yields the messages of dtrain's warnings, which are appended as they come."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def _connect_peer(case: BenchmarkCase, device: torch.device) -> None:
    """Makes the process group of one rank that a peer expects, and the environment of its launcher."""
    if case.is_dtrain or case.engine == "plain":
        return
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    if case.engine.startswith("deepspeed") and device.type == "cpu":
        load(device)  # else DeepSpeed compiles an extension for CPUs, which training does not use


# -- measurement -------------------------------------------------------------------------------------------------------


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - start


def _window_ms(training: RankTraining, steps: int, device: torch.device, losses: list[Callable[[], float]]) -> float:
    """Returns the milliseconds of a step; the host reads no loss, so that it can run ahead of the device."""
    if device.type == "cpu":
        return 1000 * _seconds(lambda: losses.extend(next(training.losses) for _ in range(steps)), device) / steps
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        losses.append(next(training.losses))
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / steps


def _attempt(
    job: CaseJob, batches: Batches, training: RankTraining, device: torch.device
) -> tuple[list[int], int | None]:
    """Tries ``job.attempts`` micro-batches in rising order; returns those that fit, and the first that does not.

    An engine may be unusable after an error in its backward, so the first error is the last attempt.
    """
    fitted: list[int] = []
    for micro_batch in range(job.micro_batch + 1, job.micro_batch + 1 + job.attempts):
        _empty_cache(device)
        try:
            batches.resize(micro_batch, 1)
            for _ in range(_STEPS_OF_AN_ATTEMPT):
                next(training.losses)()
            _synchronize(device)
        except torch.OutOfMemoryError:
            return fitted, micro_batch
        fitted.append(micro_batch)
    return fitted, None


def _compiled_graphs() -> tuple[int, int]:
    """Returns the number of compiled graphs, and of graph breaks."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _reset_peaks(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peaks(device: torch.device) -> tuple[int, int]:
    """Returns the highest allocated and reserved bytes since the last reset."""
    if device.type == "cpu":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _available(device: torch.device) -> int:
    """Returns the bytes that this process can have: its own and the free ones."""
    if device.type == "cpu":
        return 0
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
