"""``dtrain plan time``: how long a step takes, what it consists of, and what faster products would bring."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import torch.distributed as dist

from dtrain.config.dump import config_from_dict, config_to_dict, from_plain
from dtrain.distributed.startup.launch_env import num_cores
from dtrain.distributed.transport.choose import make_communicator
from dtrain.measure.ranks import run_ranks
from dtrain.measure.worker import Rank
from dtrain.planning.planned_run import PlannedRun
from dtrain.planning.record.ranks import HOST, SOCKETS
from dtrain.planning.time.amdahl import Item, expected, limit, limit_line, profile_items, record, speedups
from dtrain.planning.time.measured import PlannedRank, StepTime
from dtrain.planning.time.network import Network
from dtrain.planning.time.prediction import Assumptions, Prediction, PricedRun, assumptions, predict
from dtrain.planning.time.replay import PURPOSES
from dtrain.telemetry.throughput import mfu_text
from dtrain.tools.tables import Table, plural, show

_BUDGET_S = 10.0
_NUM_ITEMS = 5
_PHASES = {"data_wait_ms": "wait for data", "forward_ms": "forward", "backward_ms": "backward", "update_ms": "update"}


@dataclass(frozen=True)
class RankTime:
    """Times of one rank.

    Attributes:
        step: without profiler.
        mfu: None if unknown.
        items: operations of a step, longest first.
        speedups: of the products, by format.
        precision: name of the policy.
    """

    step: StepTime
    mfu: float | None
    items: list[Item]
    speedups: dict[str, float]
    precision: str


def show_time(run: PlannedRun, assumed: Assumptions, network: Path | None) -> None:
    """Prints the time of a step of ``run``: measured if its device is this machine's, else predicted.

    Args:
        run: see above.
        assumed: for a prediction.
        network: for a measurement: the results of ``dtrain bench collectives``; None: communication takes no time.

    Raises:
        ConfigError: ``network`` is no such file, or a rate of a device that is elsewhere is not published.
        RankError: the steps failed.
    """
    if not run.device.is_here:
        show_prediction(predict(run, assumed), assumed)
        return
    if network is not None:
        Network.read(network, run.transport)  # an error here is shown before the processes start
    times = measure_time(run, network, _BUDGET_S)
    show([phase_table(times)])
    for line in summary(times, run, network):
        print(line)
    print()
    show([item_table(times), *([format_table(times)] if times.speedups else [])])
    if not times.speedups:
        print(f"{limit_line(product_share(times))}; in no other format have they been timed")


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
        f"{found.targets_per_s:,.0f} {run.unit}/s on {plural(run.num_ranks, 'rank')}, at most "
        f"{targets / least.total:,.0f}: each operation alone, at the published rate or bandwidth, which no run reaches"
    )
    for line in (*assumptions(run, assumed), limit_line(least.products / least.total)):
        print(line)
    transfers = step.total()
    if transfers.count:
        print(
            f"{transfers.count} collectives a step, of which a rank receives {transfers.nbytes / 1e6:.4g} MB in "
            f"{1e3 * transfers.seconds:.4g} ms, {1e3 * transfers.exposed:.4g} ms of which it waits"
        )


def measure_time(run: PlannedRun, network: Path | None, budget_s: float) -> RankTime:
    """Returns the times of the slowest of the ranks that share this host, each in a process of its own.

    The ranks of a CPU share its cores and memory, so as many run at the same time as the host has; a GPU runs one.
    The steps take ``budget_s`` seconds, and the products twice as many.
    """
    config = run.config
    is_cpu = run.device.type == "cpu"
    asked = config.launch.num_processes
    processes = min(run.num_ranks, asked if isinstance(asked, int) else num_cores()) if is_cpu else 1
    threads = config.launch.threads_per_rank or (
        1 if config.engine.reproducible and is_cpu else max(1, num_cores() // processes)
    )
    # ranks of several hosts go through sockets
    transport = SOCKETS if run.transport == HOST and processes < run.num_ranks else run.transport
    job = {
        "config": config_to_dict(config),
        "ranks": run.num_ranks,
        "transport": transport,
        "network": None if network is None else str(network.resolve()),
        "budget_s": budget_s,
    }
    rank = Rank(job, ranks=processes, device=config.launch.device, threads=threads)
    with tempfile.TemporaryDirectory(prefix="dtrain-plan-") as folder:
        results = run_ranks("dtrain.planning.time.show:measure_rank", rank, folder=Path(folder))
    return max((from_plain(RankTime, result) for result in results), key=lambda times: times.step.ms)


def measure_rank(rank: Rank) -> RankTime:
    """Measures a rank of the planned job beside the others that share this host.

    The job is ``config``, ``ranks`` of the run, their ``transport``, the file ``network`` or None, and ``budget_s``:
    seconds for the steps, and twice as many for the products.
    """
    job, device = rank.job, rank.torch_device()
    processes = make_communicator(dist.group.WORLD if rank.ranks > 1 else None, device, shared_memory=False)
    planned = PlannedRank(config_from_dict(job["config"]), job["ranks"], device, job["transport"])
    network = None if job["network"] is None else Network.read(Path(job["network"]), job["transport"])
    step = planned.time(network, job["budget_s"], processes.barrier)
    items = profile_items(planned)
    faster = speedups(record(planned), device, 2 * job["budget_s"])
    processes.barrier()
    return RankTime(step, planned.utilization(step.ms / 1e3), items, faster, planned.engine.policy.name)


def part_table(title: str, ms: Mapping[str, float]) -> Table:
    """Returns a table of the parts of a step, the last of which is ``step``, the whole."""
    rows = [(name, f"{taken:.4g}", f"{taken / ms['step']:.0%}") for name, taken in ms.items()]
    return Table(title, ("part", "ms", "share"), rows)


def phase_table(times: RankTime) -> Table:
    step = times.step
    waited = sum(step.waited_ms) / len(step.waited_ms)
    phases = {**{_PHASES[name]: ms for name, ms in step.phases_ms.items()}, "wait for ranks": waited}
    other = max(0.0, step.ms - sum(phases.values()))
    return part_table("Time of a step", {**phases, "other": other, "step": step.ms})


def summary(times: RankTime, run: PlannedRun, network: Path | None) -> list[str]:
    step, train = times.step, run.config.train
    tokens = train.global_batch_size * run.config.targets_per_sample
    totals = [busy + waited for busy, waited in zip(step.busy_ms, step.waited_ms, strict=True)]
    low, _, high = quantiles(totals, n=4)
    lines = [
        f"{step.ms:.4g} ms a step (half of them between {low:.4g} and {high:.4g}), {tokens / step.ms * 1e3:,.0f} "
        f"{run.unit}/s, on {plural(run.num_ranks, 'rank')}; {plural(train.steps, 'step')} take "
        f"{_duration(train.steps * step.ms / 1e3)}, without evaluation and checkpoints"
    ]
    if run.compiles_blocks:
        lines.append(f"model.compile={run.config.model.compile}: the blocks are timed as they are, not compiled")
    if times.mfu is not None:
        lines.append(f"MFU {mfu_text(times.mfu)}")
    if run.num_ranks > 1:
        lines.append(_communication(times, run, network))
    return lines


def _communication(times: RankTime, run: PlannedRun, network: Path | None) -> str:
    step = times.step
    traffic = f"{step.num_transfers} collectives a step, of which a rank receives {step.received / 1e6:.4g} MB"
    if network is None:
        return (
            f"communication is not in these times: {traffic}; measure the network by dtrain bench collectives "
            "bench.out=network.json, and give network=network.json"
        )
    hidden = sum(step.hidden_ms) / len(step.hidden_ms)
    return f"communication: {traffic}; {hidden:.4g} ms of it happen while the rank computes"


def item_table(times: RankTime) -> Table:
    step_ms = _work_ms(times)

    def row(name: str, ms: float, calls: str = "", note: str = "") -> tuple[str, ...]:
        return name, calls, f"{ms:.4g}", f"{ms / step_ms:.1%}", note

    others = [item for item in times.items if not item.is_product]
    rest = others[_NUM_ITEMS:]
    rows = [
        *(row(i.name, i.ms, str(i.calls), "would fuse it" if i.is_elementwise else "") for i in others[:_NUM_ITEMS]),
        row(f"{len(rest)} other operations", sum(item.ms for item in rest)),
        row("no operation: Python, launches", step_ms - sum(item.ms for item in times.items)),
    ]
    title = f"Largest items beside products, which are {product_share(times):.0%} of the work"
    return Table(title, ("operation", "calls", "ms", "share", "compile"), rows)


def product_share(times: RankTime) -> float:
    """Returns the share of products in a rank's own work."""
    return sum(item.ms for item in times.items if item.is_product) / _work_ms(times)


def _work_ms(times: RankTime) -> float:
    """Returns the milliseconds of a rank's own work: of the steps without the profiler, or of those in it if slower."""
    busy = times.step.busy_ms
    return max(sum(busy) / len(busy), sum(item.ms for item in times.items))


def format_table(times: RankTime) -> Table:
    share = product_share(times)
    rows = [
        (name, f"{speedup:.3g} x", f"{expected(share, speedup):.3g} x", f"{limit(share):.3g} x")
        for name, speedup in times.speedups.items()
    ]
    title = f"Amdahl's law: products in another format than {times.precision}'s, as measured at their sizes"
    return Table(title, ("format", "faster products", "faster step", "limit of the step"), rows)


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    return f"{hours:.1f} h" if hours >= 2 else f"{minutes:.1f} min" if minutes >= 2 else f"{seconds:.0f} s"
