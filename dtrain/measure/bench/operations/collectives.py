"""``dtrain bench collectives``: the collectives of a step, by size, through sockets and through shared memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.config.dump import from_plain
from dtrain.config.tool_schema import BenchSuite, CollectivesBenchConfig
from dtrain.device import elapsed_ms
from dtrain.distributed.communicator import Communicator, GradientSend
from dtrain.distributed.startup.setup import choose_device
from dtrain.distributed.transport.choose import make_communicator
from dtrain.distributed.transport.host_memory import HostMemory
from dtrain.measure.bench.operations.timing import Operation, describe, measure_operations, time_on_ranks
from dtrain.measure.bench.records import OperationResults, OperationTiming
from dtrain.measure.worker import Rank
from dtrain.sharding.layout import CHUNK

_DESCRIPTION = (
    "{ranks} on {device}, {threads} each. The workload names the elements of a flat buffer of which each rank owns one "
    "slice. GB/s counts the bytes that a rank must receive; an all-reduce receives twice. Time of the slowest rank."
)


def run_collectives_suite(config: BenchSuite[CollectivesBenchConfig], command: str) -> Iterator[OperationResults]:
    bench = config.bench
    device = choose_device(bench.device, 0).type

    def measure() -> list[OperationTiming]:
        with tempfile.TemporaryDirectory(prefix="dtrain-bench-") as folder:
            return time_on_ranks("collectives", bench, Path(folder))

    yield from measure_operations(
        "collectives",
        command,
        config,
        describe(_DESCRIPTION, bench, device),
        measure,
        baselines=["sockets"] if device == "cpu" else [],
    )


def time_sizes(rank: Rank) -> list[OperationTiming]:
    """Times the collectives on one rank; see ``time_on_ranks``."""
    bench = from_plain(CollectivesBenchConfig, rank.job["bench"])
    comms = communicators(rank.torch_device())
    timings = [timing for size in bench.sizes for timing in _time_size(comms, size, bench.rounds)]
    for comm in comms.values():
        comm.release()
    return timings


def communicators(device: torch.device) -> dict[str, Communicator]:
    """Returns a communicator for each transport: NCCL on GPUs, else sockets and, if it can be mapped, shared memory."""
    group = dist.group.WORLD
    if device.type == "cuda":
        return {"nccl": make_communicator(group, device)}
    comms = {"sockets": make_communicator(group, device, shared_memory=False)}
    shared = make_communicator(group, device)
    if isinstance(shared, HostMemory) and shared.is_shared(shared.allocate(CHUNK, torch.float32)):
        comms["shared memory"] = shared
    return comms


def _time_size(comms: Mapping[str, Communicator], size: int, rounds: int) -> Iterator[OperationTiming]:
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
    elapsed = torch.tensor([elapsed_ms(run, comm.device)], dtype=torch.float64, device=comm.device)
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

    exchange = comm.gradient_exchange([GradientSend("bench", numel, torch.bfloat16, ((0, numel),))], 0)
    weight = torch.ones((), device=comm.device)

    def all_to_all() -> None:
        exchange.begin(weight)
        exchange.open(0)
        handle = exchange.send(0)
        add_up(handle.wait()[0])
        handle.release()

    def all_reduce() -> None:
        comm.reduce_scatter_sum(own_fp32, fp32, label="bench").wait()
        comm.all_gather(fp32, own_fp32, label="bench").wait()

    return {
        "all_gather BF16": Operation(lambda: comm.all_gather(bf16, own_bf16, label="bench").wait(), 2 * received),
        "all_to_all BF16, sum FP32": Operation(all_to_all, 2 * received),
        "reduce_scatter FP32": Operation(
            lambda: comm.reduce_scatter_sum(own_fp32, fp32, label="bench").wait(), 4 * received
        ),
        "all_reduce FP32": Operation(all_reduce, 8 * received),
    }
