"""Ranks as threads, and small unevenly sharded tensors, for the tests of checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint import Snapshot, save
from dtrain.checkpoint.snapshot import TensorShard
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.transport.single_rank import SingleRank

Tensors = Mapping[tuple[str, str], Tensor]
ALONE = SingleRank(torch.device("cpu"))


class ThreadCommunicator(SingleRank):
    """One of several ranks that are threads of this process; supports ``exchange_text`` only."""

    def __init__(self, rank: int, world_size: int, barrier: threading.Barrier, board: list[str]) -> None:
        super().__init__(torch.device("cpu"))
        self.rank, self.world_size = rank, world_size
        self._barrier, self._board = barrier, board

    def exchange_text(self, text: str) -> list[str]:
        self._board[self.rank] = text
        self._barrier.wait()
        texts = list(self._board)
        self._barrier.wait()
        return texts


def on_threads(world: int, fn: Callable[[Communicator], Any]) -> list[Any]:
    """Calls ``fn(comm)`` on ``world`` ranks; returns each rank's result or exception."""
    barrier, board = threading.Barrier(world, timeout=120), [""] * world

    def call(rank: int) -> Any:
        try:
            return fn(ThreadCommunicator(rank, world, barrier, board))
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(call, range(world)))


def make_tensors(seed: int = 0) -> dict[tuple[str, str], Tensor]:
    """Returns (kind, name) -> tensor, of several kinds, dtypes and shapes (one empty, one scalar)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {(kind, "weight"): normal(5, 7) for kind in ("master", "exp_avg", "exp_avg_sq")}
    tensors |= {(kind, "blocks.0.bias"): normal(11) for kind in ("master", "exp_avg", "exp_avg_sq")}
    tensors["buffer", "running_mean"] = normal(6).to(torch.bfloat16)
    tensors["buffer", "num_batches"] = torch.tensor(seed)
    tensors["buffer", "mask"] = torch.tensor([[True, False, True]])
    tensors["frozen", "none"] = torch.empty(0, 3)
    return tensors


def shard(key: tuple[str, str], tensor: Tensor, start: int, stop: int) -> TensorShard:
    data = tensor.reshape(-1)[start:stop].clone()
    return TensorShard(key[1], key[0], tuple(tensor.shape), tensor.dtype, start, stop, data)


def shards_of(tensors: Tensors, rank: int, world: int) -> tuple[TensorShard, ...]:
    """Returns a rank's shards: sharded kinds cut evenly, the other kinds whole on rank 0."""
    shards = []
    for key, tensor in tensors.items():
        numel, is_sharded = tensor.numel(), key[0] not in ("buffer", "frozen")
        bounds = [round(numel * part / world) if is_sharded or part == 0 else numel for part in range(world + 1)]
        if bounds[rank] < bounds[rank + 1] or (numel == 0 and rank == 0):
            shards.append(shard(key, tensor, bounds[rank], bounds[rank + 1]))
    return tuple(shards)


def save_threads(directory: Path, step: int, world: int = 2, *, seed: int | None = None, **options: Any) -> list[Any]:
    """Saves ``make_tensors(seed)`` (seed: the step by default) from ``world`` threads; returns each result or error."""
    tensors = make_tensors(step if seed is None else seed)

    def work(comm: Communicator) -> Path:
        snapshot = Snapshot(step, shards_of(tensors, comm.rank, world), {"world_size": world, "extra": {"step": step}})
        return save(directory, snapshot, comm, **options)

    return on_threads(world, work)


def save_good(directory: Path, step: int, world: int = 2, **options: Any) -> Path:
    """As ``save_threads``, asserting that every rank succeeds; returns the path."""
    results = save_threads(directory, step, world, **options)
    assert all(isinstance(result, Path) for result in results), results
    return results[0]


def assert_holds(reader: Any, tensors: Tensors) -> None:
    """Asserts that the reader holds exactly ``tensors``, with their dtypes, shapes and bits."""
    assert {(tensor.kind, tensor.name) for tensor in reader.tensors} == set(tensors)
    for entry in reader.tensors:
        expected = tensors[entry.kind, entry.name]
        assert (entry.dtype, entry.shape) == (expected.dtype, tuple(expected.shape))
        assert torch.equal(reader.read(entry.kind, entry.name), expected.reshape(-1))
