"""Ranks that read each other's buffers: the bits of sockets, no traces, the same failures, and the fallback."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.distributed import processes
from dtrain.distributed.communicator import Communicator, GradientSend
from dtrain.distributed.logging import logger
from dtrain.distributed.transport import pipes, shared_memory
from dtrain.distributed.transport.choose import make_communicator
from dtrain.distributed.transport.host_memory import HostMemory, RingExchange
from dtrain.errors import CommunicationError
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
NUMEL = 3000  # of one rank's slice
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def communicator(*, shared: bool) -> Communicator:
    return make_communicator(dist.group.WORLD, CPU, shared_memory=shared)


def is_shared(comm: Communicator, tensor: Tensor) -> bool:
    return isinstance(comm, HostMemory) and comm.is_shared(tensor)


def all_reduce(comm: Communicator, *tensors: Tensor) -> None:
    """Sums each of ``tensors`` over the ranks in place; several are in flight at once, each in two collectives."""
    shards = [tensor.view(comm.world_size, -1)[comm.rank] for tensor in tensors]
    pairs = list(zip(tensors, shards, strict=True))
    for handle in [comm.reduce_scatter_sum(shard, tensor, label="sum") for tensor, shard in pairs]:
        handle.wait()
    for handle in [comm.all_gather(tensor, shard, label="sum") for tensor, shard in pairs]:
        handle.wait()


def numbers(rank: int, numel: int, seed: int) -> Tensor:
    """Numbers of very different sizes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    sizes = 10.0 ** torch.randint(-3, 4, (numel,), generator=generator)
    return torch.randn(numel, generator=generator) * sizes


def fill(comm: Communicator, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    tensor = comm.allocate(numel, dtype)
    tensor.copy_(numbers(comm.rank, numel, seed))
    return tensor


def all_collectives(rank: int, world: int, shared: bool) -> dict[str, Tensor]:
    """Returns the result of each collective on this rank, in place and not, twice over the same buffers."""
    comm = communicator(shared=shared)
    got: dict[str, Tensor] = {}
    for dtype in DTYPES:
        flat, shard = fill(comm, world * NUMEL, dtype, 1), fill(comm, NUMEL, dtype, 2)
        assert is_shared(comm, flat) == is_shared(comm, shard[5:]) == shared
        for repeat in range(2):
            output = torch.empty(world * NUMEL, dtype=dtype)
            comm.all_gather(output, shard, label="g").wait()
            got[f"gather {dtype} {repeat}"] = output
            own = flat[rank * NUMEL : (rank + 1) * NUMEL]
            comm.all_gather(flat, own, label="g in place").wait()
            got[f"gather in place {dtype} {repeat}"] = flat.clone()
            comm.barrier()
            flat.add_(rank)
            shard.mul_(2)
    for numel in (1, 400, 3000):  # of 3000 the rows are too large for the pipes
        for dtype in DTYPES:
            got[f"rows {numel} {dtype}"] = comm.gather_rows(numbers(rank, numel, 8).to(dtype), label="rows")
        got[f"rows {numel} bool"] = comm.gather_rows(numbers(rank, numel, 8) > 0, label="rows")
    got["rows 0"] = comm.gather_rows(torch.empty(0), label="rows")
    full = fill(comm, world * NUMEL, torch.float32, 3)
    output = torch.empty(NUMEL)
    comm.reduce_scatter_sum(output, full, label="rs").wait()
    got["reduce-scatter"] = output.clone()
    own = full[rank * NUMEL : (rank + 1) * NUMEL]
    comm.reduce_scatter_sum(own, full, label="rs in place").wait()
    got["reduce-scatter in place"] = own.clone()
    rounded = fill(comm, world * NUMEL, torch.float32, 7)
    comm.reduce_scatter_sum(output, rounded, label="rounded", dtype=torch.bfloat16).wait()
    assert comm.schedule.log[-1] == f"all_to_all_single(rounded, {world * NUMEL} x bfloat16)"
    assert torch.equal(rounded, numbers(rank, world * NUMEL, 7)), "what is sent is rounded, not the gradient itself"
    got["reduce-scatter in BF16"] = output.clone()
    comm.reduce_scatter_sum(torch.empty(0), comm.allocate(0, torch.float32), label="empty").wait()
    return got


@pytest.mark.parametrize("world", [2, 3])
def test_same_bits_as_sockets(world: int) -> None:
    through_sockets = run_ranks(world, all_collectives, False)
    in_place = run_ranks(world, all_collectives, True)
    for rank in range(world):
        assert through_sockets[rank].keys() == in_place[rank].keys()
        for name, tensor in through_sockets[rank].items():
            assert in_place[rank][name].dtype == tensor.dtype
            assert torch.equal(in_place[rank][name], tensor), f"rank {rank}: {name}"
        rows = [numbers(other, world * NUMEL, 7).bfloat16().float().view(world, -1)[rank] for other in range(world)]
        assert torch.equal(in_place[rank]["reduce-scatter in BF16"], sum(rows[1:], rows[0]))


def _fail(*_: object) -> None:
    raise OSError(28, "injected")


ON_OTHER_HOST = "the ranks are on several hosts or in several containers"
FALLBACKS: dict[str, tuple[str, str]] = {  # what fails on rank 1; what every rank says, and how messages travel
    "map": ("rank 1: [Errno 28] injected", "Pipes"),
    "memory is short": ("rank 1: [Errno 28] injected", "Pipes"),
    "other host": (ON_OTHER_HOST, "Sockets"),
    "create a pipe": ("", "Sockets"),
    "open a pipe": ("", "Sockets"),
}


def fail_on_the_last(rank: int, world: int, what: str) -> tuple[str, str, list[bool], bool]:
    """Returns the reason, the kind of messages, which buffers are shared before and after, and if sums are right."""
    log: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "info", log.append)
        if rank == world - 1:
            if what == "other host":
                patch.setattr(processes, "host_identity", lambda: ["another", "host"])
            elif what == "create a pipe":
                patch.setattr(os, "pipe2", _fail)
            elif what == "open a pipe":
                patch.setattr(pipes, "open_descriptor", _fail)
        descriptors = len(os.listdir("/proc/self/fd"))
        comm = communicator(shared=True)
        opened = len(os.listdir("/proc/self/fd")) - descriptors
        assert opened == 1 or what != "create a pipe", "one socket to the other rank"
        shared = [is_shared(comm, comm.allocate(8, torch.float32))]
        if rank == world - 1 and what == "map":
            patch.setattr(shared_memory, "_map", _fail)
        elif rank == world - 1 and what == "memory is short":
            patch.setattr(os, "posix_fallocate", _fail)
        tensor = comm.allocate(world * 4, torch.float32)
        later = comm.allocate(4, torch.float32)
        exchange = comm.gradient_exchange([GradientSend("g", 4 * world, torch.float32, ((0, 4 * world),))], 0)
    shared += [is_shared(comm, tensor), is_shared(comm, later), isinstance(exchange, RingExchange)]
    tensor.fill_(rank + 1)
    all_reduce(comm, tensor)
    assert comm.gather_rows(torch.tensor([rank]), label="rows").flatten().tolist() == list(range(world))
    comm.barrier()
    reason = log[-1].partition("not shared memory: ")[2]
    return reason, type(comm.messages).__name__, shared, bool(tensor.eq(world * (world + 1) / 2).all())


@pytest.mark.parametrize("what", FALLBACKS)
def test_all_ranks_fall_back_together(what: str) -> None:
    reason, messages = FALLBACKS[what]
    before = what != "other host"
    after = not reason  # without pipes the messages alone go through sockets
    assert run_ranks(2, fail_on_the_last, what) == [(reason, messages, [before, after, after, after], True)] * 2


def traces(rank: int, world: int) -> tuple[list[str], set[str], list[int]]:
    """Returns descriptors and files of dtrain beside a communicator, and the descriptors of two of them and after."""
    files, before = set(os.listdir("/dev/shm")), set(os.listdir("/proc/self/fd"))
    links, counts = [], []

    def count() -> None:
        counts.append(len(set(os.listdir("/proc/self/fd")) - before))

    for is_released in (True, False):
        comm = communicator(shared=True)
        assert is_shared(comm, fill(comm, 1 << 16, torch.float32, 0))
        comm.barrier()
        count()
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        created = {name for name in set(os.listdir("/dev/shm")) - files if not name.startswith("tmp")}  # of other tests
        if is_released:
            comm.release()
        else:
            del comm
            gc.collect()
        count()
    return [link for link in links if "dtrain" in link], created, counts


def test_leaves_no_descriptor_and_no_file() -> None:
    assert run_ranks(3, traces) == [([], set(), [4, 0, 4, 0])] * 3


FAILURES = {
    "all_to_all": r"rank 0: all_to_all_single\(blocks.0, 6000 x float32\) failed",
    "gather_rows": r"rank 0: gather_rows\(vote, 3 x int64\) failed",
}


def lose_a_rank(rank: int, world: int, folder: Path, what: str) -> None:
    """Rank 1 is killed before it sends its message: that its gradient is ready, or its row."""
    comm = communicator(shared=True)
    tensor = fill(comm, world * NUMEL, torch.float32, 0)
    all_reduce(comm, tensor)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    starts: dict[str, Callable[[], Any]] = {
        "all_to_all": lambda: comm.reduce_scatter_sum(torch.empty(NUMEL), tensor, label="blocks.0").wait(),
        "gather_rows": lambda: comm.gather_rows(torch.zeros(3, dtype=torch.int64), label="vote"),
    }
    with pytest.raises(CommunicationError, match=FAILURES[what]) as caught:
        starts[what]()
    (folder / "error").write_text(str(caught.value), encoding="ascii")


@pytest.mark.parametrize("what", sorted(FAILURES))
def test_a_killed_rank_is_an_error_at_once(tmp_path: Path, what: str) -> None:
    with pytest.raises(AssertionError, match="rank 1:\nthe process died without a result") as failure:
        run_ranks(2, lose_a_rank, tmp_path, what)
    assert "rank 0:" not in str(failure.value)
    assert (tmp_path / "error").read_text(encoding="ascii").endswith("(rank 1 has ended)")
