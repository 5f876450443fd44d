"""``dtrain bench host``: the host time of a training step by part, beside the plain loop of the same model."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config.dump import config_to_dict, from_plain
from dtrain.config.engines import Native
from dtrain.config.model import ModelConfig
from dtrain.config.precision import PrecisionConfig
from dtrain.config.schema import RunConfig, TrainConfig
from dtrain.config.tool_schema import HostBenchConfig, ModelSuite
from dtrain.device import synchronize
from dtrain.distributed.startup.setup import choose_device, connect
from dtrain.engine.parts.part import HOOKS
from dtrain.measure.bench.records import TableResults
from dtrain.measure.bench.training.model import build_on, compile_blocks
from dtrain.measure.bench.training.part_times import PartTimes
from dtrain.measure.bench.training.trace import record_trace
from dtrain.measure.ranks import run_ranks
from dtrain.measure.record import head
from dtrain.measure.worker import Rank
from dtrain.telemetry.throughput import device_name
from dtrain.tools.processes import failure_reason
from dtrain.tools.tables import Table, plural
from dtrain.train.garbage import GarbageCollection
from dtrain.train.session import Session
from dtrain.train.setup import make_engine

_METHODS = {
    "_finish_gradients": "reduction",
    "_squares": "norm",
    "_vote": "vote",
    "_update": "weights",
    "_finalize_step": "finalize",
}
"""Names of parts by the engine's method."""
_ORDER = ("forward", "backward", *_METHODS.values(), "update", "guards", "other")
_MEASURE = str(Path(__file__).parents[2])
_PACKAGE = str(Path(_MEASURE).parent)
_LIMIT_S, _WHOLE = 600.0, "engine: step"
_DESCRIPTION = (
    "{layers} blocks of width {width}, {tokens} tokens a rank, {ranks} of {device}. {clock} Medians, on the rank with "
    "the longest step. Plain: a loop without an engine, in turn with it in one process. Added: by the engine, its "
    "update too, to the plain loop's forward and backward, and to its whole step. A part counts without the parts "
    "inside it: update is what `engine.step` does beside reduction, norm, vote, weights, finalize and guards; guards "
    "watch all of a step. Calls: of Python functions of dtrain. Operations: kernel launches of a step, on a CPU those "
    "that are no views."
)
_CLOCKS = {
    "cpu": "Times of the processor for one thread, so waits for other ranks hardly count, and kernels do.",
    "cuda": "Wall times; the host waits for the device between steps only. Idle: the device, in a profiled step.",
}


def run_host_suite(config: ModelSuite[HostBenchConfig], command: str) -> Iterator[TableResults]:
    """Measures each precision at each stage on ``bench.ranks`` new processes; one that fails costs no other."""
    bench, model, device = config.bench, config.model, choose_device(config.bench.device, 0)
    description = _DESCRIPTION.format(
        layers=model.num_layers,
        width=model.hidden_dim,
        tokens=bench.micro_batch_size * model.max_seq_len,
        ranks=plural(bench.ranks, "rank"),
        device=device_name(device),
        clock=_CLOCKS[device.type],
    )
    header = head(command, config)
    results = TableResults(suite="host", **header, description=description, tables=[], conclusions=[], rows=[])
    for case in [{"precision": name, "stage": stage} for name in bench.precisions for stage in bench.stages]:
        job = {**case, "config": config_to_dict(config)}
        rank = Rank(job, ranks=bench.ranks, device=bench.device, threads=bench.threads_per_rank)
        try:
            with tempfile.TemporaryDirectory(prefix="dtrain-bench-") as folder:
                found = run_ranks(f"{__name__}:measure_case", rank, folder=Path(folder), limit_s=_LIMIT_S)
            results.rows.append({**case, "figures": max(found, key=lambda figures: float(figures[_WHOLE]))})
        except Exception as error:  # one case must not cost the others
            results.failures.append(f"{case['precision']}, stage {case['stage']}: {failure_reason(error)}")
        yield _with_table(results)


def measure_case(rank: Rank) -> dict[str, float]:
    """Returns the figures of one rank by name, in milliseconds unless they are counts."""
    values, precision = rank.job["config"], rank.job["precision"]
    bench, model = from_plain(HostBenchConfig, values["bench"]), from_plain(ModelConfig, values["model"])
    size, device = bench.micro_batch_size, rank.torch_device()
    run = RunConfig(
        train=TrainConfig(micro_batch_size=size, global_batch_size=size * rank.ranks),
        engine=Native(zero_stage=rank.job["stage"]),
        precision=PrecisionConfig(precision),
        model=model,
    )
    engine: Any = make_engine(run, build_on(device, model, run.seed), connect(device))
    times = PartTimes(torch.device("cpu"), time.thread_time if device.type == "cpu" else time.perf_counter)
    for method, part in _METHODS.items():
        times.watch(engine, method, part)
    for hook in HOOKS:
        times.watch(engine._parts, hook, "guards")
    session = Session(engine, run, weigh=lambda _: 1.0)
    tokens = torch.zeros(size, model.max_seq_len, dtype=torch.int64, device=device)
    batch, plain = {"tokens": tokens, "targets": tokens}, build_on(device, model, run.seed)
    if model.compile != "none":
        compile_blocks(plain, wraps=False)
    steps: dict[str, Callable[[], object]] = {
        "plain": plain_step(plain, batch, times, bf16=precision not in ("fp32", "tf32")),
        "engine": lambda: session.step([batch], times.inside("other"), watch=times),
    }
    ms: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    with GarbageCollection(1) as garbage:
        for number in range(-1, bench.rounds):  # the first one warms up
            for name, step in steps.items():
                engine.comm.barrier()
                for _ in range(bench.steps if number >= 0 else bench.warmup_steps):
                    step()
                    synchronize(device)
                    ms[name] += [times.take()] if number >= 0 else []
                    garbage.after_step(0)
    figures: dict[str, float] = {
        f"{name}: {part}": median(step.get(part, 0.0) for step in taken)
        for name, taken in ms.items()
        for part in _ORDER
        if part in taken[-1]
    }
    figures[_WHOLE] = median(sum(step.values()) for step in ms["engine"])
    figures["added"] = figures[_WHOLE] - median(step["forward"] + step["backward"] for step in ms["plain"])
    figures["added to a whole step"] = figures[_WHOLE] - median(sum(step.values()) for step in ms["plain"])
    figures["calls added"] = calls_of(steps["engine"]) - calls_of(steps["plain"])
    for name, step in steps.items():
        trace = record_trace(step, device)
        figures[f"{name}: operations"] = trace.num_launches
        if device.type == "cuda":
            figures[f"{name}: idle"] = trace.idle_ms
    return figures


def plain_step(model: nn.Module, batch: Mapping[str, Tensor], times: PartTimes, *, bf16: bool) -> Callable[[], None]:
    """Returns the step of a loop without an engine."""
    optimizer, device = torch.optim.AdamW(model.parameters(), fused=True), batch["tokens"].device.type

    def step() -> None:
        with times.inside("forward"), torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = model(**batch).loss
        with times.inside("backward"):
            loss.backward()
        with times.inside("update"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


def calls_of(work: Callable[[], Any]) -> int:
    """Returns the number of calls of Python functions of dtrain in ``work``, those of measuring left out."""
    paths: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            paths.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        # else the backward of a GPU runs in a thread that is not seen
        with torch.autograd.set_multithreading_enabled(False):
            work()
    finally:
        sys.setprofile(None)
    return sum(path.startswith(_PACKAGE) and not path.startswith(_MEASURE) for path in paths)


def _with_table(results: TableResults) -> TableResults:
    found = [row["figures"] for row in results.rows]
    # a line for each figure and not for each case, because there are more of them
    lines = [
        (name, *(f"{value:.2f}" if isinstance(value := figures[name], float) else str(value) for figures in found))
        for name in dict.fromkeys(name for figures in found for name in figures)
    ]
    titles = [f"{row['precision']}, stage {row['stage']}" for row in results.rows]
    return replace(results, tables=[Table("Host", ("ms", *titles), lines)])
