"""``dtrain bench checkpoint``: how long training stands still for a save, and how long until it is on the disk.

Run as a module it is one rank: an ``_Order`` as a line of JSON on standard input, rank 0's timings on standard output.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from dtrain.checkpoint import Saver, Snapshot, storage
from dtrain.checkpoint.format.fingerprint import byte_view
from dtrain.checkpoint.lease.lease import hold
from dtrain.checkpoint.snapshot import TensorShard
from dtrain.config.dump import from_plain
from dtrain.config.schema import CheckpointBenchConfig, CheckpointSuiteConfig
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.file_store import join_ranks
from dtrain.distributed.setup import choose_device
from dtrain.errors import ConfigError
from dtrain.tools.bench.records import Timing, Timings
from dtrain.tools.bench.timing import make_timings
from dtrain.tools.ranks import open_answer, read_order, run_ranks

_ABOUT = (
    "{ranks} rank{many} on {device}, {threads} thread{plural} each; so many MB of FP32 masters and moments a rank. "
    "Stall: until training may go on; total: until the checkpoint is on the disk and complete. Floor: of the stall one "
    "copy of the state into memory of the host that is there already; of the total a write of the same bytes to one "
    "file a rank, and its fsync. Training stands still meanwhile; time: of the slowest rank. The files are removed "
    "after each turn. Disks have caches and neighbours of their own."
)
_FLOOR = "floor"
_RIVALS = ["DCP async_save", "torch.save, fsync"]
_PARAMETER = 1 << 20  # elements of this rank's part of one parameter


@dataclass(frozen=True)
class _Order:
    rank: int
    store: str
    folder: str
    bench: CheckpointBenchConfig


def run_checkpoint_suite(config: CheckpointSuiteConfig, command: str) -> Timings:
    """Times saves on ``bench.ranks`` processes, in a new folder of ``bench.dir`` that is removed at the end.

    Raises:
        RankError: a rank failed.
        ConfigError: a device that is not there, or a folder that nothing can be written to.
    """
    bench = config.bench
    about = _ABOUT.format(
        ranks=bench.ranks,
        many="s" if bench.ranks > 1 else "",
        device=choose_device(bench.device, 0).type,
        threads=bench.threads_per_rank,
        plural="s" if bench.threads_per_rank > 1 else "",
    )
    return make_timings(
        "checkpoint", command, config, about, lambda: _run_ranks(bench), rivals=_RIVALS, bandwidth=_FLOOR
    )


def _run_ranks(bench: CheckpointBenchConfig) -> list[Timing]:
    try:
        place = tempfile.TemporaryDirectory(prefix="dtrain-bench-", dir=bench.dir)
    except OSError as error:
        raise ConfigError(f"bench.dir={bench.dir}: {error.strerror}; name a folder on the disk to measure") from None
    with place as name:
        folder = Path(name).resolve()
        orders = [_Order(rank, str(folder / "store"), str(folder), bench) for rank in range(bench.ranks)]
        answers = run_ranks(
            "dtrain.tools.bench.checkpoint",
            [json.dumps(asdict(order)) for order in orders],
            threads=bench.threads_per_rank,
            folder=folder / "ranks",
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
    comm = Communicator(dist.group.WORLD if bench.ranks > 1 else None, device)
    timings = [
        timing
        for megabytes in bench.sizes
        for timing in time_size(comm, Path(order.folder), megabytes * 10**6, bench.rounds)
    ]
    if order.rank == 0:
        json.dump([asdict(timing) for timing in timings], replies)
    replies.close()
    comm.release()
    if bench.ranks > 1:
        dist.destroy_process_group()


def time_size(comm: Communicator, folder: Path, nbytes: int, rounds: int) -> Iterator[Timing]:
    """Stall and total of every contender with a state of about ``nbytes``; the first of their turns is not counted."""
    state = State(comm, nbytes)
    turns = contenders(state)
    ms: dict[str, list[list[float]]] = {name: [] for name in turns}
    path = folder / "checkpoints"
    for number in range(rounds + 1):
        for name, turn in turns.items():
            if comm.rank == 0:
                path.mkdir()
            comm.barrier()
            elapsed = torch.tensor(turn(path), dtype=torch.float64, device=comm.device)
            slowest = comm.gather_rows(elapsed, label="elapsed").amax(dim=0)
            if number:
                ms[name].append((1000 * slowest).tolist())
            if comm.rank == 0:
                shutil.rmtree(path)
                storage.sync_directory(folder)  # else the next one pays for what the file system still does
    for kind, of_kind in (("stall", 0), ("total", 1)):
        for name, pairs in ms.items():
            case = f"{kind}, {state.nbytes / 1e6:,.0f} MB"
            yield Timing(name, state.nbytes, [pair[of_kind] for pair in pairs], case=case)


class State:
    """What one rank saves: its intervals of masters and moments.

    Args:
        comm: the ranks, each of which holds an equal part of every tensor.
        nbytes: of this rank's part, about.
    """

    def __init__(self, comm: Communicator, nbytes: int) -> None:
        self.comm = comm
        parameters = torch.arange(max(1, nbytes // 12), device=comm.device).split(_PARAMETER)
        self.pieces = tuple(
            self._piece(f"blocks.{number}.weight", kind, len(indices))
            for number, indices in enumerate(parameters)
            for kind in ("master", "exp_avg", "exp_avg_sq")
        )
        self.nbytes = sum(piece.data.nbytes for piece in self.pieces)
        self.snapshot = Snapshot(1, self.pieces, {})

    def _piece(self, name: str, kind: str, numel: int) -> TensorShard:
        start, shape = self.comm.rank * numel, (self.comm.world_size * numel,)
        return TensorShard(
            name, kind, shape, torch.float32, start, start + numel, torch.rand(numel, device=self.comm.device)
        )

    def named(self) -> dict[str, Tensor]:
        """The same tensors as a state dict whose keys no other rank has."""
        return {f"{piece.kind}.{piece.name}.{self.comm.rank}": piece.data for piece in self.pieces}


Turn = Callable[[Path], tuple[float, float]]
"""Saves into an empty folder; seconds until training may go on, and until the bytes are on the disk."""


def contenders(state: State) -> Mapping[str, Turn]:
    """The floors, dtrain's saves and the peers, by name."""
    comm, named, saver = state.comm, state.named(), Saver(state.comm)
    # peers meet in a group of their own: saving from a thread takes one whose collectives run on the host
    group = dist.new_group(backend="gloo") if comm.world_size > 1 else None

    def save_dcp(path: Path) -> tuple[float, float]:
        return _timed(comm.device, lambda: dcp.save(named, checkpoint_id=path, process_group=group))

    def save_torch(path: Path) -> tuple[float, float]:
        def write() -> None:
            with (path / f"{comm.rank}.pt").open("wb") as file:
                torch.save(named, file)  # noqa: TID251 - what a user without a library writes; it is never read
                os.fsync(file.fileno())

        return _timed(comm.device, write)

    return {
        _FLOOR: _floor(state),
        "ours": _ours(state, saver),
        "ours, asynchronous": _ours_asynchronous(state, saver),
        "DCP save": save_dcp,
        "DCP async_save": _dcp_asynchronous(named, group, comm.device),
        "torch.save, fsync": save_torch,
    }


def _timed(
    device: torch.device, start: Callable[[], object], finish: Callable[[], object] = lambda: None
) -> tuple[float, float]:
    began = time.perf_counter()
    start()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # copies that are only queued keep training waiting too
    stalled = time.perf_counter() - began
    finish()
    return stalled, time.perf_counter() - began


def _floor(state: State) -> Turn:
    device = state.comm.device
    on_gpu = device.type == "cuda"
    copies = [torch.empty(piece.data.shape, pin_memory=on_gpu) for piece in state.pieces]

    def copy() -> None:
        for target, piece in zip(copies, state.pieces, strict=True):
            target.copy_(piece.data, non_blocking=True)

    def turn(path: Path) -> tuple[float, float]:
        stalled, _ = _timed(device, copy)
        descriptor = storage.create(path / str(state.comm.rank))

        def write() -> None:
            for target in copies:
                os.write(descriptor, byte_view(target))
            os.fsync(descriptor)

        _, total = _timed(device, write)
        os.close(descriptor)
        return stalled, total

    return turn


def _ours(state: State, saver: Saver) -> Turn:
    def turn(path: Path) -> tuple[float, float]:
        with _lease(state.comm, path):
            return _timed(state.comm.device, lambda: saver.save(path, state.snapshot, None))

    return turn


def _ours_asynchronous(state: State, saver: Saver) -> Turn:
    def turn(path: Path) -> tuple[float, float]:
        with _lease(state.comm, path):
            return _timed(state.comm.device, lambda: saver.start(path, state.snapshot, None), saver.wait)

    return turn


def _lease(comm: Communicator, path: Path) -> AbstractContextManager[object]:
    """A run has held it since its start, so taking it is not timed."""
    return hold(path) if comm.rank == 0 else nullcontext()


def _dcp_asynchronous(named: dict[str, Tensor], group: dist.ProcessGroup | None, device: torch.device) -> Turn:
    on_gpu = device.type == "cuda"
    # keeps its memory from one save to the next; by default every save pays for new pages
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=on_gpu, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=on_gpu
        )
    )

    def turn(path: Path) -> tuple[float, float]:
        under_way: list[Any] = []

        def start() -> None:
            under_way.append(dcp.async_save(named, checkpoint_id=path, process_group=group, async_stager=stager))

        return _timed(device, start, lambda: under_way[0].result())

    return turn


if __name__ == "__main__":
    main()
