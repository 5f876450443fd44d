"""One run of a training case in a process of its own: builds it, warms up, times windows of steps.

A process for each run: two models of 3B parameters do not fit one GPU, and an error of one case, such as a failed
kernel, cannot reach the next.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from dtrain.config.dump import from_plain
from dtrain.measure.accept.job import Request
from dtrain.measure.bench.records import LinearFormat, RankJob
from dtrain.measure.bench.training.worker import RankCase, kept_warnings
from dtrain.measure.worker import Rank, connected
from dtrain.telemetry.gpu import GPUState


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
    config = deepcopy(job.rank_job.config)
    config["bench"] |= {
        "data": "device" if job.is_text else "random",
        "window_steps": job.steps,
        "attempts": job.attempts,
        "micro_batch_size": job.micro_batch,
    }
    case = job.rank_job.case
    if job.is_compiled:
        config["model"]["compile"] = "blocks"
        if case.blocks is not None:
            case = replace(case, blocks=replace(case.blocks, compile="blocks"))
    rank = Rank(device=config["bench"]["device"], threads=config["bench"]["threads_per_rank"])
    with connected(rank), kept_warnings() as warnings:
        start = time.perf_counter()
        running = RankCase.prepare(RankJob(case, config, "", job.micro_batch), rank)
        setup_s = time.perf_counter() - start
        first = running.take_steps(1)
        warmup = running.take_steps(job.warmup - 1)
        running.footprint(last=False, warnings=[])
        timed = running.take_steps(job.windows * job.steps)
        at_rest = torch.cuda.memory_allocated() if running.device.type == "cuda" else 0
        held = running.footprint(last=True, warnings=warnings)
    assert held.flops_causal is not None
    assert held.flops_full is not None
    return CaseFigures(
        device=held.device,
        num_parameters=held.num_parameters,
        micro_batch=job.micro_batch,
        model_states=held.state,
        formula=held.formula,
        setup_s=setup_s,
        first_step_s=first.step_ms[0] / 1000,
        window_ms=timed.step_ms,
        losses=[loss for steps in (first, warmup, timed) for loss in steps.losses if loss is not None],
        at_rest=at_rest,
        peak_allocated=held.peak_device or 0,
        peak_reserved=held.peak_reserved or 0,
        available=held.available or 0,
        flops_causal=held.flops_causal,
        flops_full=held.flops_full,
        state=timed.gpu,
        graphs=held.graphs or 0,
        graph_breaks=held.graph_breaks,
        warnings=held.warnings,
        host_kinds=held.host_kinds,
        activations=held.activations,
        linears=held.linears,
        fitted=held.fitted,
        failed=held.unfit,
        emulates_float8=held.emulates_float8,
    )
