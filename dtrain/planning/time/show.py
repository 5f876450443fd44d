"""``dtrain plan time``: how long a step takes, what it consists of, and what faster products would bring."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median, quantiles

import torch.distributed as dist

from dtrain.config.dump import config_from_dict, config_to_dict, from_plain
from dtrain.distributed.startup.launch_env import num_cores
from dtrain.distributed.transport.choose import make_communicator
from dtrain.measure.ranks import run_ranks
from dtrain.measure.worker import Rank
from dtrain.planning.planned_run import PlannedRun
from dtrain.planning.time.measured import PHASES, Item, PlannedRank, expected, limit_line, speedups
from dtrain.planning.time.prediction import NO_NETWORK, Assumptions, Prediction, PricedRun, assumptions, predict
from dtrain.planning.time.replay import PURPOSES, Replay
from dtrain.telemetry.texts import duration
from dtrain.telemetry.throughput import mfu, mfu_text
from dtrain.tools.tables import Table, plural, show

_BUDGET_S = 10.0
_NUM_ITEMS = 5


@dataclass(frozen=True)
class RankTime:
    """The measurements of one rank by ``PlannedRank``; ``speedups`` are those of its products, by format."""

    busy_ms: list[float]
    phases_ms: dict[str, float]
    flops: tuple[float, float] | None
    items: list[Item]
    speedups: dict[str, float]
    precision: str

    @property
    def ms(self) -> float:
        return median(self.busy_ms)

    @property
    def work_ms(self) -> float:
        """Milliseconds of a rank's own work: of the steps without the profiler, or of those in it if slower."""
        return max(mean(self.busy_ms), sum(item.ms for item in self.items))

    @property
    def product_share(self) -> float:
        """Share of products in a rank's own work."""
        return sum(item.ms for item in self.items if item.is_product) / self.work_ms


def show_time(run: PlannedRun, assumed: Assumptions) -> None:
    """Prints the time of a step of ``run``; the rank's own work is measured if its device is this machine's.

    Raises:
        ConfigError: the network does not fit the run, or a rate of a device that is elsewhere is not published.
        RankError: the steps failed.
    """
    if not run.device.is_here:
        show_prediction(predict(run, assumed), assumed)
        return
    if run.device.type == "cpu" and _num_processes(run) < run.num_ranks:  # several hosts, connected by sockets
        run = replace(run, config=replace(run.config, launch=replace(run.config.launch, shared_memory=False)))
    assumed.links(run, has_rates=False)  # an error here is shown before the processes start
    times = measure_time(run, _BUDGET_S)
    step = with_ranks(run, times, assumed)
    show([phase_table(times, step)])
    for line in summary(times, step, run, assumed):
        print(line)
    print()
    show([item_table(times), *([format_table(times)] if times.speedups else [])])
    if not times.speedups:
        print(f"{limit_line(times.product_share)}; in no other format have they been timed")


def with_ranks(run: PlannedRun, times: RankTime, assumed: Assumptions) -> Replay:
    """Returns the step of ``run`` whose rank has taken ``times``, with what it waits for other ranks."""
    if run.num_ranks == 1:
        return Replay(times.ms / 1e3, times.ms / 1e3, 0.0)
    return predict(run, replace(assumed, step_ms=times.ms)).step


def show_prediction(found: Prediction, assumed: Assumptions) -> None:
    """Prints the parts of a predicted step, each beside the least that it takes."""
    run, step, work = found.recorded.run, found.step, found.priced.parts
    least = PricedRun.of(found.recorded).parts
    factor = step.compute / work.total
    parts = [
        ("products", factor * work.products, least.products),
        ("other operations", factor * work.others, least.others),
        ("update", factor * work.update, least.update),
        ("slowed by transfers", step.slowed, 0.0),
        *((f"wait: {purpose}", step.total(purpose).exposed, 0.0) for purpose in PURPOSES),
        ("step", step.seconds, least.total),
    ]
    rows = [
        (name, f"{1e3 * taken:.4g}", f"{taken / step.seconds:.0%}", f"{1e3 * bound:.4g}" if bound else "")
        for name, taken, bound in parts
        if taken
    ]
    show([Table(f"Time of a step on {run.device.name}", ("part", "ms", "share", "at least ms"), rows)])
    targets = run.config.train.global_batch_size * run.config.targets_per_sample
    print(
        f"{found.targets_per_s:,.0f} {run.task.unit}/s on {plural(run.num_ranks, 'rank')}, at most "
        f"{targets / least.total:,.0f}: each operation alone, at the published rate or bandwidth, which no run reaches"
    )
    for line in (*assumptions(run, assumed), limit_line(least.products / least.total), *_communication(step, assumed)):
        print(line)


def measure_time(run: PlannedRun, budget_s: float) -> RankTime:
    """Returns the times of the slowest of the ranks that share this host, each in a process of its own.

    The ranks of a CPU share its cores and memory, so as many run at the same time as the host has; a GPU runs one.
    The steps take ``budget_s`` seconds, and the products twice as many.
    """
    config = run.config
    is_cpu, processes = run.device.type == "cpu", _num_processes(run)
    threads = config.launch.threads_per_rank or (
        1 if config.engine.reproducible and is_cpu else max(1, num_cores() // processes)
    )
    job = {"config": config_to_dict(config), "ranks": run.num_ranks, "transport": run.transport, "budget_s": budget_s}
    rank = Rank(job, ranks=processes, device=config.launch.device, threads=threads)
    with tempfile.TemporaryDirectory(prefix="dtrain-plan-") as folder:
        results = run_ranks("dtrain.planning.time.show:measure_rank", rank, folder=Path(folder))
    return max((from_plain(RankTime, result) for result in results), key=lambda times: times.ms)


def _num_processes(run: PlannedRun) -> int:
    asked = run.config.launch.num_processes
    host = asked if isinstance(asked, int) else num_cores()
    return min(run.num_ranks, host) if run.device.type == "cpu" else 1


def measure_rank(rank: Rank) -> RankTime:
    """Measures a rank of the planned job beside the others that share this host.

    The job is ``config``, ``ranks`` of the run, their ``transport``, and ``budget_s``: seconds for the steps, and twice
    as many for the products.
    """
    job, device = rank.job, rank.torch_device()
    processes = make_communicator(dist.group.WORLD if rank.ranks > 1 else None, device, shared_memory=False)
    planned = PlannedRank(config_from_dict(job["config"]), job["ranks"], device, job["transport"])
    busy_ms, phases_ms = planned.time(job["budget_s"], processes.barrier)
    items = planned.items()
    faster = speedups(planned.calls(), device, 2 * job["budget_s"])
    processes.barrier()
    return RankTime(busy_ms, phases_ms, planned.flops(), items, faster, planned.engine.policy.name)


def phase_table(times: RankTime, step: Replay) -> Table:
    """Returns a table of the measured phases and the predicted waits."""
    whole, waited = 1e3 * step.seconds, 1e3 * (step.seconds - step.compute)
    parts = {**{PHASES[name]: ms for name, ms in times.phases_ms.items()}, "wait for ranks": waited}
    parts |= {"other": max(0.0, whole - sum(parts.values())), "step": whole}
    rows = [(name, f"{taken:.4g}", f"{taken / whole:.0%}") for name, taken in parts.items()]
    return Table("Time of a step", ("part", "ms", "share"), rows)


def summary(times: RankTime, step: Replay, run: PlannedRun, assumed: Assumptions) -> list[str]:
    train, ms, waited = run.config.train, 1e3 * step.seconds, 1e3 * step.seconds - times.ms
    tokens = train.global_batch_size * run.config.targets_per_sample
    low, _, high = quantiles(times.busy_ms, n=4)
    lines = [
        f"{ms:.4g} ms a step (half of them between {low + waited:.4g} and {high + waited:.4g}), "
        f"{tokens / step.seconds:,.0f} {run.task.unit}/s, on {plural(run.num_ranks, 'rank')}; "
        f"{plural(train.steps, 'step')} take {duration(train.steps * step.seconds)}, without evaluation and checkpoints"
    ]
    if run.compiles_blocks:
        lines.append(f"model.compile={run.config.model.compile}: the blocks are timed as they are, not compiled")
    flops, model = times.flops or (None, None), run.device.model
    causal, full = (mfu(model, times.precision, each and each / step.seconds) for each in flops)
    if causal is not None:
        lines.append(f"MFU {mfu_text(causal, full)}")
    return [*lines, *_communication(step, assumed)]


def _communication(step: Replay, assumed: Assumptions) -> Iterator[str]:
    transfers = step.total()
    traffic = f"{transfers.count} collectives a step, of which a rank receives {transfers.nbytes / 1e6:.4g} MB"
    if transfers.count and assumed.network == NO_NETWORK:
        yield (
            f"communication is not in these times: {traffic}; measure the network by dtrain bench collectives "
            "bench.out=network.json, and give network=network.json"
        )
    elif transfers.count:
        yield (
            f"{traffic} in {1e3 * transfers.seconds:.4g} ms through {assumed.network}, "
            f"{1e3 * transfers.exposed:.4g} ms of which it waits"
        )


def item_table(times: RankTime) -> Table:
    others = [item for item in times.items if not item.is_product]
    rest = others[_NUM_ITEMS:]
    lines = [
        *((i.name, str(i.calls), i.ms, "would fuse it" if i.is_elementwise else "") for i in others[:_NUM_ITEMS]),
        (f"{len(rest)} other operations", "", sum(item.ms for item in rest), ""),
        ("no operation: Python, launches", "", times.work_ms - sum(item.ms for item in times.items), ""),
    ]
    rows = [(name, calls, f"{ms:.4g}", f"{ms / times.work_ms:.1%}", note) for name, calls, ms, note in lines]
    title = f"Largest items beside products, which are {times.product_share:.0%} of the work"
    return Table(title, ("operation", "calls", "ms", "share", "compile"), rows)


def format_table(times: RankTime) -> Table:
    share = times.product_share
    rows = [
        (name, f"{speedup:.3g} x", f"{expected(share, speedup):.3g} x", f"{expected(share):.3g} x")
        for name, speedup in times.speedups.items()
    ]
    title = f"Amdahl's law: products in another format than {times.precision}'s, as measured at their sizes"
    return Table(title, ("format", "faster products", "faster step", "limit of the step"), rows)
