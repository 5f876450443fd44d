"""``dtrain bench collectives``: what a step sends, by size, through sockets and through shared memory.

Run as a module it is one rank: an ``_Order`` as a line of JSON on standard input, rank 0's timings on standard output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.bench.contest import environment
from dtrain.bench.records import Timing, Timings, from_plain
from dtrain.bench.timing import Operation, make_timings
from dtrain.config.schema import CollectivesBenchConfig, CollectivesSuiteConfig
from dtrain.distributed.collectives import Communicator
from dtrain.distributed.setup import choose_device
from dtrain.errors import BenchError
from dtrain.sharding.layout import CHUNK

_TIMEOUT_S = 600.0
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
        BenchError: a rank failed.
        ConfigError: a device that is not there.
    """
    bench = config.bench
    device = choose_device(bench.device, 0).type
    plural = "s" if bench.threads_per_rank > 1 else ""
    about = _ABOUT.format(ranks=bench.ranks, device=device, threads=bench.threads_per_rank, plural=plural)
    rivals = ["sockets"] if device == "cpu" else []
    return make_timings("collectives", command, config, about, lambda: _run_ranks(bench), rivals=rivals)


def _run_ranks(bench: CollectivesBenchConfig) -> list[Timing]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dtrain-bench-"))
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "dtrain.bench.collectives"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(Path(folder, f"{rank}.log").open("w", encoding="utf-8")),
                env=environment(bench.threads_per_rank),
                text=True,
            )
            for rank in range(bench.ranks)
        ]
        try:
            for rank, process in enumerate(processes):
                assert process.stdin is not None
                process.stdin.write(json.dumps(asdict(_Order(rank, str(Path(folder, "store")), bench))) + "\n")
                process.stdin.flush()
            answers = [process.communicate()[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, process in enumerate(processes):
            if process.returncode:
                words = Path(folder, f"{rank}.log").read_text(encoding="utf-8").strip().splitlines()
                raise BenchError(f"rank {rank} ended with exit code {process.returncode}: {(words or ['no word'])[-1]}")
    return [from_plain(Timing, timing) for timing in json.loads(answers[0])]


def main() -> None:
    """One rank."""
    order = from_plain(_Order, json.loads(sys.stdin.readline()))
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get into the reply
    bench = order.bench
    torch.set_num_threads(bench.threads_per_rank)
    device = choose_device(bench.device, order.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.FileStore(order.store, bench.ranks)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=order.rank, world_size=bench.ranks, timeout=timeout)
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
            lambda: comm.exchange_slices(low, add_up, label="bench").wait(), 2 * received
        ),
        "reduce_scatter FP32": Operation(
            lambda: comm.reduce_scatter_sum(own, full, label="bench").wait(), 4 * received
        ),
        "all_reduce FP32": Operation(lambda: comm.all_reduce_sum(full, label="bench").wait(), 8 * received),
    }


if __name__ == "__main__":
    main()
