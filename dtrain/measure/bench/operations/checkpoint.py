"""``dtrain bench checkpoint``: the stall of training during a save, and the time until the save is on the disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from dtrain.checkpoint import AsyncSaver, Snapshot, storage
from dtrain.checkpoint.format.fingerprint import byte_view
from dtrain.checkpoint.lease.lease import hold
from dtrain.checkpoint.snapshot import TensorShard
from dtrain.config.dump import from_plain
from dtrain.config.tool_schema import BenchSuite, CheckpointBenchConfig
from dtrain.device import synchronize
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.startup.setup import choose_device
from dtrain.distributed.transport.choose import make_communicator
from dtrain.errors import ConfigError
from dtrain.measure.bench.operations.timing import describe, measure_operations, time_on_ranks
from dtrain.measure.bench.records import OperationResults, OperationTiming
from dtrain.measure.worker import Rank

_DESCRIPTION = (
    "{ranks} on {device}, {threads} each. The workload names the MB of FP32 masters and moments of one rank. Stall: "
    "until training continues. Total: until the checkpoint is on the disk and complete. Lower bound of the stall: "
    "one copy of the state into host memory that is already mapped; of the total: write and fsync of the same bytes, "
    "one file a rank. Time of the slowest rank. The files are removed after each save."
)
_LOWER_BOUND = "lower bound"
_BASELINES = ["DCP async_save", "torch.save, fsync"]
_PARAMETER = 1 << 20  # elements of this rank's shard of one parameter


def run_checkpoint_suite(config: BenchSuite[CheckpointBenchConfig], command: str) -> Iterator[OperationResults]:
    """Times saves on ``bench.ranks`` processes, in a new folder of ``bench.dir`` that is removed at the end."""
    bench = config.bench
    yield from measure_operations(
        "checkpoint",
        command,
        config,
        describe(_DESCRIPTION, bench, choose_device(bench.device, 0).type),
        lambda: _measure(bench),
        baselines=_BASELINES,
        reference=_LOWER_BOUND,
    )


def _measure(bench: CheckpointBenchConfig) -> list[OperationTiming]:
    try:
        temporary = tempfile.TemporaryDirectory(prefix="dtrain-bench-", dir=bench.dir)
    except OSError as error:
        raise ConfigError(f"bench.dir={bench.dir}: {error.strerror}; name a folder on the disk to measure") from None
    with temporary as name:
        return time_on_ranks("checkpoint", bench, Path(name).resolve())


def time_sizes(rank: Rank) -> list[OperationTiming]:
    """Times the saves on one rank; see ``time_on_ranks``."""
    bench, folder = from_plain(CheckpointBenchConfig, rank.job["bench"]), Path(rank.job["folder"])
    comm = make_communicator(dist.group.WORLD if bench.ranks > 1 else None, rank.torch_device())
    timings = [timing for size in bench.sizes for timing in _time_size(comm, folder, size * 10**6, bench.rounds)]
    comm.release()
    return timings


def _time_size(comm: Communicator, folder: Path, nbytes: int, rounds: int) -> Iterator[OperationTiming]:
    """Times stall and total of every case with a state of about ``nbytes``, after one round that is not counted."""
    state = State(comm, nbytes)
    saves = save_cases(state)
    ms: dict[str, list[list[float]]] = {name: [] for name in saves}
    path = folder / "checkpoints"
    for number in range(rounds + 1):
        for name, save in saves.items():
            if comm.rank == 0:
                path.mkdir()
            comm.barrier()
            elapsed = torch.tensor(save(path), dtype=torch.float64, device=comm.device)
            slowest = comm.gather_rows(elapsed, label="elapsed").amax(dim=0)
            if number:
                ms[name].append((1000 * slowest).tolist())
            if comm.rank == 0:
                shutil.rmtree(path)
                storage.sync_directory(folder)  # otherwise the next save waits for the file system's pending work
    for kind, index in (("stall", 0), ("total", 1)):
        for name, pairs in ms.items():
            workload = f"{kind}, {state.nbytes / 1e6:,.0f} MB"
            yield OperationTiming(name, state.nbytes, [pair[index] for pair in pairs], workload=workload)


class State:
    """About ``nbytes`` of masters and AdamW's states, this rank's shards; ranks hold equal shards of every tensor."""

    def __init__(self, comm: Communicator, nbytes: int) -> None:
        self.comm = comm
        parameters = torch.arange(max(1, nbytes // 12), device=comm.device).split(_PARAMETER)
        self.shards = tuple(
            self._shard(f"blocks.{number}.weight", kind, len(indices))
            for number, indices in enumerate(parameters)
            for kind in ("master", "exp_avg", "exp_avg_sq")
        )
        self.nbytes = sum(shard.nbytes for shard in self.shards)
        self.snapshot = Snapshot(1, self.shards, {})

    def _shard(self, name: str, kind: str, numel: int) -> TensorShard:
        start, shape = self.comm.rank * numel, (self.comm.world_size * numel,)
        return TensorShard(
            name, kind, shape, torch.float32, start, start + numel, torch.rand(numel, device=self.comm.device)
        )

    def named(self) -> dict[str, Tensor]:
        """Returns the same tensors as a state dict whose keys differ from every other rank's."""
        return {f"{shard.kind}.{shard.name}.{self.comm.rank}": shard.data for shard in self.shards}


Save = Callable[[Path], tuple[float, float]]
"""Saves into an empty folder; returns the seconds until training continues, and until the bytes are on the disk."""


def save_cases(state: State) -> Mapping[str, Save]:
    comm, named, saver, snapshot = state.comm, state.named(), AsyncSaver(state.comm), state.snapshot
    # The peers need a group whose collectives run on the host, because they save from a thread.
    group = dist.new_group(backend="gloo") if comm.process_group is not None else None

    def save(path: Path) -> tuple[float, float]:
        with _lease(comm, path):
            return _timed(comm.device, lambda: saver.save(path, snapshot, None))

    def save_asynchronously(path: Path) -> tuple[float, float]:
        with _lease(comm, path):
            return _timed(comm.device, lambda: saver.start(path, snapshot, None), saver.wait)

    def save_dcp(path: Path) -> tuple[float, float]:
        return _timed(comm.device, lambda: dcp.save(named, checkpoint_id=path, process_group=group))

    def save_torch(path: Path) -> tuple[float, float]:
        def write() -> None:
            with (path / f"{comm.rank}.pt").open("wb") as file:
                torch.save(named, file)  # noqa: TID251 - a user's own save; it is never read
                os.fsync(file.fileno())

        return _timed(comm.device, write)

    return {
        _LOWER_BOUND: _lower_bound(state),
        "dtrain": save,
        "dtrain, asynchronous": save_asynchronously,
        "DCP save": save_dcp,
        "DCP async_save": _dcp_asynchronous(named, group, comm.device),
        "torch.save, fsync": save_torch,
    }


def _timed(
    device: torch.device, start: Callable[[], object], finish: Callable[[], object] = lambda: None
) -> tuple[float, float]:
    began = time.perf_counter()
    start()
    synchronize(device)  # training also waits for copies that are only queued
    stalled = time.perf_counter() - began
    finish()
    return stalled, time.perf_counter() - began


def _lower_bound(state: State) -> Save:
    device = state.comm.device
    on_gpu = device.type == "cuda"
    copies = [torch.empty(shard.data.shape, pin_memory=on_gpu) for shard in state.shards]

    def copy() -> None:
        for target, shard in zip(copies, state.shards, strict=True):
            target.copy_(shard.data, non_blocking=True)

    def save(path: Path) -> tuple[float, float]:
        stalled, _ = _timed(device, copy)
        descriptor = storage.create(path / str(state.comm.rank))

        def write() -> None:
            for target in copies:
                os.write(descriptor, byte_view(target))
            os.fsync(descriptor)

        _, total = _timed(device, write)
        os.close(descriptor)
        return stalled, total

    return save


def _lease(comm: Communicator, path: Path) -> AbstractContextManager[object]:
    """Returns the lease. It is not timed, because a run takes it once, at its start."""
    return hold(path) if comm.rank == 0 else nullcontext()


def _dcp_asynchronous(named: dict[str, Tensor], group: dist.ProcessGroup | None, device: torch.device) -> Save:
    on_gpu = device.type == "cuda"
    # Reuses its memory, as dtrain's save does; by default every save allocates new pages.
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=on_gpu, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=on_gpu
        )
    )

    # PyTorch 2.11 closes it after each save, which would forget that memory and make it unusable
    stager._state_dict_stager.close = lambda: None  # type: ignore[method-assign]

    def save(path: Path) -> tuple[float, float]:
        pending: list[Any] = []

        def start() -> None:
            pending.append(dcp.async_save(named, checkpoint_id=path, process_group=group, async_stager=stager))

        return _timed(device, start, lambda: pending[0].result())

    return save
