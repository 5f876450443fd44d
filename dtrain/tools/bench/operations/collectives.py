"""``dtrain bench collectives``: the collectives of a step, by size, through sockets and through shared memory.

Run as a module it is one rank: it reads a ``_CollectivesJob`` as JSON, and rank 0 writes the timings.
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
from dtrain.config.tool_schema import CollectivesBenchConfig, CollectivesSuiteConfig
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.setup import choose_device, connect_by_file
from dtrain.sharding.layout import CHUNK
from dtrain.tools.bench.operations.timing import Operation, measure_operations, plural
from dtrain.tools.bench.records import OperationResults, OperationTiming
from dtrain.tools.ranks import open_result, read_job, run_ranks

_DESCRIPTION = (
    "{ranks} on {device}, {threads} each. The workload names the elements of a flat buffer of which each rank owns one "
    "slice. GB/s counts the bytes that a rank must receive; an all-reduce receives twice. Time of the slowest rank."
)


@dataclass(frozen=True)
class _CollectivesJob:
    rank: int
    store: str
    bench: CollectivesBenchConfig


def run_collectives_suite(config: CollectivesSuiteConfig, command: str) -> OperationResults:
    """Times each collective on ``bench.ranks`` processes.

    Raises:
        RankError: a rank failed.
        ConfigError: a device that does not exist.
    """
    bench = config.bench
    device = choose_device(bench.device, 0).type
    return measure_operations(
        "collectives",
        command,
        config,
        describe(bench, device),
        lambda: _run_ranks(bench),
        baselines=["sockets"] if device == "cpu" else [],
    )


def describe(bench: CollectivesBenchConfig, device: str) -> str:
    """Returns the workload, and what GB/s counts."""
    ranks, threads = plural(bench.ranks, "rank"), plural(bench.threads_per_rank, "thread")
    return _DESCRIPTION.format(ranks=ranks, device=device, threads=threads)


def _run_ranks(bench: CollectivesBenchConfig) -> list[OperationTiming]:
    with tempfile.TemporaryDirectory(prefix="dtrain-bench-") as folder:
        store = str(Path(folder, "store"))
        jobs = [json.dumps(asdict(_CollectivesJob(rank, store, bench))) for rank in range(bench.ranks)]
        results = run_ranks(
            "dtrain.tools.bench.operations.collectives",
            jobs,
            threads=bench.threads_per_rank,
            folder=Path(folder, "ranks"),
        )
    return [from_plain(OperationTiming, timing) for timing in json.loads(results[0])]


def main() -> None:
    """Runs one rank."""
    job = from_plain(_CollectivesJob, json.loads(read_job()))
    results = open_result()
    bench = job.bench
    torch.set_num_threads(bench.threads_per_rank)
    device = choose_device(bench.device, job.rank)
    connect_by_file(job.store, job.rank, bench.ranks, device)
    comms = communicators(device)
    timings = [timing for size in bench.sizes for timing in time_size(comms, size, bench.rounds)]
    if job.rank == 0:
        json.dump([asdict(timing) for timing in timings], results)
    results.close()
    for comm in comms.values():
        comm.release()
    dist.destroy_process_group()


def communicators(device: torch.device) -> dict[str, Communicator]:
    """Returns a communicator for each transport: NCCL on GPUs, else sockets and, if it can be mapped, shared memory."""
    group = dist.group.WORLD
    if device.type == "cuda":
        return {"nccl": Communicator(group, device)}
    shared = Communicator(group, device)
    shared.allocate(CHUNK, torch.float32)
    transports = {"sockets": Communicator(group, device, shared_memory=False), "shared memory": shared}
    return {name: comm for name, comm in transports.items() if name == "sockets" or comm.may_share}


def time_size(comms: Mapping[str, Communicator], size: int, rounds: int) -> Iterator[OperationTiming]:
    """Times every collective on a flat buffer of about ``size`` elements, after one round that is not counted."""
    some = next(iter(comms.values()))
    numel = size // (some.world_size * CHUNK) * some.world_size * CHUNK
    transports = {transport: operations(comm, numel) for transport, comm in comms.items()}
    for name in next(iter(transports.values())):
        ms: dict[str, list[float]] = {transport: [] for transport in transports}
        for number in range(rounds + 1):
            for transport, own in transports.items():
                elapsed = _time_slowest(comms[transport], own[name].run)
                if number:
                    ms[transport].append(elapsed)
        for transport, own in transports.items():
            yield OperationTiming(transport, own[name].nbytes, ms[transport], workload=f"{name}, {numel:,}")


def _time_slowest(comm: Communicator, run: Callable[[], object]) -> float:
    comm.barrier()
    start = time.perf_counter()
    run()
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)
    elapsed = torch.tensor([1000 * (time.perf_counter() - start)], dtype=torch.float64, device=comm.device)
    return float(comm.gather_rows(elapsed, label="elapsed").max())


def operations(comm: Communicator, numel: int) -> dict[str, Operation]:
    """Returns the collectives of a step on buffers of ``numel`` elements, by name; each waits for its end."""
    bf16, fp32 = comm.allocate(numel, torch.bfloat16), comm.allocate(numel, torch.float32)
    own_bf16 = bf16.view(comm.world_size, -1)[comm.rank]
    own_fp32 = fp32.view(comm.world_size, -1)[comm.rank]
    received = numel // comm.world_size * (comm.world_size - 1)

    def add_up(rows: Sequence[Tensor]) -> None:
        own_fp32.copy_(rows[0])
        for row in rows[1:]:
            own_fp32.add_(row)

    return {
        "all_gather BF16": Operation(lambda: comm.all_gather(bf16, own_bf16, label="bench").wait(), 2 * received),
        "all_to_all BF16, sum FP32": Operation(
            lambda: comm.all_to_all_single(bf16, add_up, label="bench").wait(), 2 * received
        ),
        "reduce_scatter FP32": Operation(
            lambda: comm.reduce_scatter_sum(own_fp32, fp32, label="bench").wait(), 4 * received
        ),
        "all_reduce FP32": Operation(lambda: comm.all_reduce_sum(fp32, label="bench").wait(), 8 * received),
    }


if __name__ == "__main__":
    main()
