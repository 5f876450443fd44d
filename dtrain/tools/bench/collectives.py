"""``dtrain bench collectives``: what a step sends, by size, through sockets and through shared memory.

Run as a module it is one rank: an ``_Order`` as a line of JSON on standard input, rank 0's timings on standard output.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.config.dump import from_plain
from dtrain.config.schema import CollectivesBenchConfig, CollectivesSuiteConfig
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.file_store import join_ranks
from dtrain.distributed.setup import choose_device
from dtrain.sharding.layout import CHUNK
from dtrain.tools.bench.records import Timing, Timings
from dtrain.tools.bench.timing import Operation, make_timings
from dtrain.tools.ranks import open_answer, read_order, run_ranks

_ABOUT = (
    "{ranks} ranks on {device}, {threads} thread{plural} each. A flat buffer of so many elements, each rank owning one "
    "slice. GB/s counts the bytes that a rank must receive; an all-reduce receives twice. Time: of the slowest rank."
)


@dataclass(frozen=True)
class _Order:
    rank: int
    store: str
    bench: CollectivesBenchConfig


def run_collectives_suite(config: CollectivesSuiteConfig, command: str) -> Timings:
    """Times each collective on ``bench.ranks`` processes.

    Raises:
        RankError: a rank failed.
        ConfigError: a device that is not there.
    """
    bench = config.bench
    device = choose_device(bench.device, 0).type
    plural = "s" if bench.threads_per_rank > 1 else ""
    about = _ABOUT.format(ranks=bench.ranks, device=device, threads=bench.threads_per_rank, plural=plural)
    rivals = ["sockets"] if device == "cpu" else []
    return make_timings("collectives", command, config, about, lambda: _run_ranks(bench), rivals=rivals)


def _run_ranks(bench: CollectivesBenchConfig) -> list[Timing]:
    with tempfile.TemporaryDirectory(prefix="dtrain-bench-") as folder:
        orders = [json.dumps(asdict(_Order(rank, str(Path(folder, "store")), bench))) for rank in range(bench.ranks)]
        answers = run_ranks(
            "dtrain.tools.bench.collectives", orders, threads=bench.threads_per_rank, folder=Path(folder, "ranks")
        )
    return [from_plain(Timing, timing) for timing in json.loads(answers[0])]


def main() -> None:
    """One rank."""
    order = from_plain(_Order, json.loads(read_order()))
    replies = open_answer()
    bench = order.bench
    torch.set_num_threads(bench.threads_per_rank)
    device = choose_device(bench.device, order.rank)
    join_ranks(order.store, order.rank, bench.ranks, device)
    comms = communicators(device)
    timings = [timing for size in bench.sizes for timing in time_size(comms, size, bench.rounds)]
    if order.rank == 0:
        json.dump([asdict(timing) for timing in timings], replies)
    replies.close()
    for comm in comms.values():
        comm.release()
    dist.destroy_process_group()


def communicators(device: torch.device) -> dict[str, Communicator]:
    """By the way in which they send; shared memory where the ranks can map it."""
    group = dist.group.WORLD
    if device.type == "cuda":
        return {"nccl": Communicator(group, device)}
    shared = Communicator(group, device)
    shared.allocate(CHUNK, torch.float32)
    ways = {"sockets": Communicator(group, device, shared_memory=False), "shared memory": shared}
    return {way: comm for way, comm in ways.items() if way == "sockets" or comm.may_share}


def time_size(comms: Mapping[str, Communicator], size: int, rounds: int) -> Iterator[Timing]:
    """Every collective on a flat buffer of about ``size`` elements; ways take turns, the first is not counted."""
    some = next(iter(comms.values()))
    numel = size // (some.world_size * CHUNK) * some.world_size * CHUNK
    ways = {way: operations(comm, numel) for way, comm in comms.items()}
    for name in next(iter(ways.values())):
        ms: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            for way, own in ways.items():
                elapsed = _time_slowest(comms[way], own[name].run)
                if number:
                    ms[way].append(elapsed)
        for way, own in ways.items():
            yield Timing(way, own[name].nbytes, ms[way], case=f"{name}, {numel:,}")


def _time_slowest(comm: Communicator, run: Callable[[], object]) -> float:
    comm.barrier()
    start = time.perf_counter()
    run()
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)
    elapsed = torch.tensor([1000 * (time.perf_counter() - start)], dtype=torch.float64, device=comm.device)
    return float(comm.gather_rows(elapsed, label="elapsed").max())


def operations(comm: Communicator, numel: int) -> dict[str, Operation]:
    """Name -> one collective of a step on buffers of ``numel`` elements, waited for."""
    low, full = comm.allocate(numel, torch.bfloat16), comm.allocate(numel, torch.float32)
    own_low = low.view(comm.world_size, -1)[comm.rank]
    own = full.view(comm.world_size, -1)[comm.rank]
    received = numel // comm.world_size * (comm.world_size - 1)

    def add_up(rows: Sequence[Tensor]) -> None:
        own.copy_(rows[0])
        for row in rows[1:]:
            own.add_(row)

    return {
        "all_gather BF16": Operation(lambda: comm.all_gather(low, own_low, label="bench").wait(), 2 * received),
        "exchange BF16, sum FP32": Operation(
            lambda: comm.all_to_all_single(low, add_up, label="bench").wait(), 2 * received
        ),
        "reduce_scatter FP32": Operation(
            lambda: comm.reduce_scatter_sum(own, full, label="bench").wait(), 4 * received
        ),
        "all_reduce FP32": Operation(lambda: comm.all_reduce_sum(full, label="bench").wait(), 8 * received),
    }


if __name__ == "__main__":
    main()
