"""Ranks that read each other's buffers: the bits of sockets, no traces, and the same failures."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dtrain
from dtrain.distributed import host_memory, pipes, processes, setup, shared_memory
from dtrain.distributed.communicator import Communicator, GradientSend
from dtrain.distributed.host_memory import HostMemory, RingExchange
from dtrain.distributed.setup import make_communicator
from dtrain.distributed.sockets import Sockets
from dtrain.engine.native import NativeEngine
from dtrain.errors import CommunicationError, DivergenceError
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, train

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
        exchange = comm.gradient_exchange([GradientSend("s", flat.numel(), dtype, ((0, flat.numel()),))], 0)
        for repeat in range(2):
            exchange.begin(torch.tensor(1.5 + rank))
            exchange.open(0).view(world, -1)[:, :NUMEL].copy_(flat.view(world, -1))  # through sockets there are gaps
            handle = exchange.send(0)
            shards, weights = handle.wait()
            got[f"slices {dtype} {repeat}"] = torch.cat([*shards, weights])
            handle.release()
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
    tensors = [fill(comm, world * NUMEL, torch.float32, seed) for seed in (4, 5, 6)]
    all_reduce(comm, *tensors)
    got["all-reduce"] = torch.cat(tensors)
    return got


@pytest.mark.parametrize("world", [2, 3, 4])
def test_same_bits_as_sockets(world: int) -> None:
    through_sockets = run_ranks(world, all_collectives, False)
    in_place = run_ranks(world, all_collectives, True)
    for rank in range(world):
        assert through_sockets[rank].keys() == in_place[rank].keys()
        for name, tensor in through_sockets[rank].items():
            assert in_place[rank][name].dtype == tensor.dtype
            assert torch.equal(in_place[rank][name], tensor), f"rank {rank}: {name}"
    for rank in range(world):
        rows = [numbers(other, world * NUMEL, 7).bfloat16().float().view(world, -1)[rank] for other in range(world)]
        assert torch.equal(in_place[rank]["reduce-scatter in BF16"], sum(rows[1:], rows[0]))
    total = torch.stack([numbers(rank, world * NUMEL, 4) for rank in range(world)]).sum(0)
    assert torch.allclose(in_place[0]["all-reduce"][: world * NUMEL], total, rtol=1e-4, atol=1e-2)


def fail_to_share(rank: int, world: int, what: str) -> tuple[bool, str, bool]:
    """Something fails on the last rank only; every rank falls back to sockets and continues."""
    if rank == world - 1 and what == "other host":
        processes.host_identity = lambda: ["another", "host"]
    log: list[str] = []
    setup.logger.info = log.append
    comm = communicator(shared=True)
    before = is_shared(comm, comm.allocate(8, torch.float32)) == (what in ("map", "memory is short"))
    assert isinstance(comm, HostMemory) == (what != "other host")
    if rank == world - 1:
        if what == "map":
            shared_memory._map = _fail  # type: ignore[assignment]
        elif what == "memory is short":
            os.posix_fallocate = _fail  # type: ignore[assignment]
    tensor = comm.allocate(world * 4, torch.float32)
    later = comm.allocate(4, torch.float32)
    exchange = comm.gradient_exchange([GradientSend("g", 4 * world, torch.float32, ((0, 4 * world),))], 0)
    assert not isinstance(exchange, RingExchange)
    tensor.fill_(rank + 1)
    all_reduce(comm, tensor)
    right = torch.equal(tensor, torch.full_like(tensor, world * (world + 1) / 2))
    assert not any((is_shared(comm, tensor), is_shared(comm, later)))
    assert comm.gather_rows(torch.tensor([rank]), label="rows").flatten().tolist() == list(range(world))
    reason = log[-1].removeprefix("buffers are sent through sockets, not shared memory: ")
    return before, reason, right


def _fail(*_: object) -> None:
    raise OSError(28, "injected")


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("map", "rank 1: [Errno 28] injected"),
        ("memory is short", "rank 1: [Errno 28] injected"),
        ("other host", "the ranks are on several hosts or in several containers"),
    ],
)
def test_falls_back_on_all_ranks(what: str, reason: str) -> None:
    for result in run_ranks(2, fail_to_share, what):
        assert result == (True, reason, True)


def without_pipes(rank: int, world: int, what: str) -> tuple[bool, int]:
    if rank == world - 1 and what == "create":
        os.pipe2 = _fail  # type: ignore[assignment]
    elif rank == world - 1:
        pipes.open_descriptor = _fail  # type: ignore[assignment]
    descriptors = len(os.listdir("/proc/self/fd"))
    comm = communicator(shared=True)
    assert isinstance(comm, HostMemory)
    assert isinstance(comm.messages, Sockets)
    opened = len(os.listdir("/proc/self/fd")) - descriptors
    tensor = comm.allocate(world * 4, torch.float32)
    tensor.fill_(rank + 1)
    all_reduce(comm, tensor)
    right = bool(tensor.eq(3).all()) and is_shared(comm, tensor)
    comm.barrier()
    return right, opened


@pytest.mark.parametrize("what", ["create", "open"])
def test_messages_go_through_sockets_if_pipes_fail_on_a_rank(what: str) -> None:
    assert run_ranks(2, without_pipes, what) == [(True, 1)] * 2


def traces(rank: int, world: int) -> tuple[list[str], set[str], bool]:
    before = set(os.listdir("/dev/shm"))
    comm = communicator(shared=True)
    tensor = comm.allocate(1 << 20, torch.float32)
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    comm.barrier()
    return [link for link in links if "dtrain" in link], set(os.listdir("/dev/shm")) - before, is_shared(comm, tensor)


def test_leaves_no_descriptor_and_no_file() -> None:
    for descriptors, files, shared in run_ranks(2, traces):
        assert shared
        assert descriptors == []
        assert files == set()


def open_descriptors(rank: int, world: int) -> list[int]:
    """Returns how many descriptors are open with a communicator, after its release, and after another is collected."""
    before = set(os.listdir("/proc/self/fd"))
    counts = []

    def count() -> None:
        counts.append(len(set(os.listdir("/proc/self/fd")) - before))

    for is_released in (True, False):
        comm = communicator(shared=True)
        fill(comm, 8, torch.float32, 0)
        comm.barrier()
        count()
        if is_released:
            comm.release()
        else:
            del comm
            gc.collect()
        count()
    return counts


@pytest.mark.parametrize("world", [2, 3])
def test_no_descriptor_outlives_its_communicator(world: int) -> None:
    assert run_ranks(world, open_descriptors) == [[2 * (world - 1), 0] * 2] * world


FAILURES = {
    "all_to_all": r"rank 0: all_to_all_single\(blocks.0, 6000 x float32\) failed",
    "gather_rows": r"rank 0: gather_rows\(vote, 3 x int64\) failed",
}


def start(comm: Communicator, what: str, tensor: Tensor) -> Callable[[], Any]:
    """Starts a collective; returns what waits for it."""
    if what == "all_to_all":
        return comm.reduce_scatter_sum(torch.empty(NUMEL), tensor, label="blocks.0").wait
    return lambda: comm.gather_rows(torch.zeros(3, dtype=torch.int64), label="vote")


def lose_a_rank(rank: int, world: int, folder: str, what: str) -> None:
    """Rank 1 dies before it has sent its message: that its gradient is ready, or its row."""
    comm = communicator(shared=True)
    tensor = fill(comm, world * NUMEL, torch.float32, 0)
    all_reduce(comm, tensor)
    assert is_shared(comm, tensor)
    if rank == 1:
        Path(folder, "pid").write_text(str(os.getpid()), encoding="ascii")
        time.sleep(60)
    wait = start(comm, what, tensor)
    while not Path(folder, "pid").exists() or not Path(folder, "pid").read_text(encoding="ascii"):
        time.sleep(0.01)
    os.kill(int(Path(folder, "pid").read_text(encoding="ascii")), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(CommunicationError, match=FAILURES[what]) as caught:
        wait()
    assert time.monotonic() - began < 5
    Path(folder, "error").write_text(str(caught.value), encoding="ascii")


@pytest.mark.parametrize("what", sorted(FAILURES))
def test_a_killed_rank_is_an_error_at_once(tmp_path: Path, what: str) -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1:\nthe process died without a result") as caught:
        run_ranks(2, lose_a_rank, str(tmp_path), what)
    assert "rank 0:" not in str(caught.value)
    assert (tmp_path / "error").read_text(encoding="ascii").endswith("(rank 1 has ended)")
    assert time.monotonic() - start < 20


def stop_a_rank(rank: int, world: int, what: str) -> float:
    """Rank 1 is stopped before it sends its message; returns how long the other waits for it."""
    comm = make_communicator(dist.new_group(timeout=timedelta(seconds=2)), CPU)
    tensor = fill(comm, world * NUMEL, torch.float32, 0)
    pid = int(comm.exchange_text(str(os.getpid()))[1])
    if rank == 1:
        os.kill(pid, signal.SIGSTOP)
        return 0.0
    while " T " not in Path(f"/proc/{pid}/stat").read_text(encoding="ascii"):  # it has not stopped itself yet
        time.sleep(0.01)
    began = time.monotonic()
    with pytest.raises(CommunicationError, match=FAILURES[what] + r".*\(rank 1 sent no message for 2 s\)"):
        start(comm, what, tensor)()
    elapsed = time.monotonic() - began
    os.kill(pid, signal.SIGCONT)
    return elapsed


@pytest.mark.parametrize("what", sorted(FAILURES))
def test_a_rank_that_hangs_is_an_error_after_the_time_out(what: str) -> None:
    assert 1.9 < run_ranks(2, stop_a_rank, what)[0] < 10


def send_different_messages(rank: int, world: int) -> str:
    comm = communicator(shared=True)
    tensor = fill(comm, world * NUMEL, torch.float32, 0)
    wait = start(comm, sorted(FAILURES)[rank], tensor)
    with pytest.raises(DivergenceError) as caught:
        wait()
    return str(caught.value)


def test_messages_of_different_collectives_are_an_error() -> None:
    first, second = run_ranks(2, send_different_messages)
    assert first == second
    assert re.match(
        r"the ranks have diverged: rank 0 is at all_to_all_single\(blocks.0, 6000 x float32\), "
        r"rank 1 is at gather_rows\(vote, 3 x int64\); every rank must call the same methods",
        first,
    )


def differ(rank: int, world: int, what: str) -> str:
    comm = communicator(shared=True)
    tensor = comm.allocate(world * 8, torch.float32)
    if what == "number" and rank == 1:
        comm.schedule.record("all_gather", "one more", tensor)
    part = tensor[: world * 4] if what == "size" and rank == 1 else tensor
    with pytest.raises(DivergenceError) as caught:
        comm.reduce_scatter_sum(torch.empty(part.numel() // world), part, label="sum").wait()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "at"),
    [
        (
            "number",
            r"rank 0 is at (all_to_all_single\(sum, 16 x float32\)) \(number (\d+), order (\w+), 40 B\), "
            r"rank 1 is at \1 \(number (?!\2)\d+, order (?!\3)\w+, 40 B\);",
        ),
        (
            "size",
            r"rank 0 is at all_to_all_single\(sum, 16 x float32\), rank 1 is at all_to_all_single\(sum, 8 x float32\);",
        ),
    ],
)
def test_other_collectives_on_another_rank_are_an_error(what: str, at: str) -> None:
    first, second = run_ranks(2, differ, what)
    assert first == second
    assert re.search(at, first), first


OPTIONS: tuple[dict[str, Any], ...] = (
    {"precision": "fp32", "zero_stage": 0},
    {"precision": "bf16", "zero_stage": 0, "reduce_dtype": "bf16"},
    {"precision": "bf16", "zero_stage": 0, "reproducible": True},
    {"precision": "bf16", "zero_stage": 1},
    {"precision": "bf16", "zero_stage": 2},
    {"precision": "bf16", "zero_stage": 3},
    {"precision": "fp32", "zero_stage": 3},
)


def messages_of_a_forward(rank: int, world: int) -> list[int]:
    """Returns the number of buffers announced in forwards at stage 3, before and after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    engine = dtrain.initialize(model, zero_stage=3, precision="bf16")
    announced: list[str] = []
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        real = HostMemory.announce

        def announce(comm: HostMemory, what: str, *args: Any) -> Any:
            announced.append(what)
            return real(comm, what, *args)

        patch.setattr(HostMemory, "announce", announce)
        for _ in range(2):
            announced.clear()
            loss = engine(torch.ones(2, 64)).float().square().mean()
            counts.append(len(announced))
            engine.backward(loss)
            engine.step()
    return counts


def test_a_forward_at_stage_3_announces_nothing() -> None:
    assert run_ranks(2, messages_of_a_forward) == [[0, 0], [0, 0]]


def train_with_and_without(rank: int, world: int) -> list[list[dict[str, Tensor]]]:
    runs = []
    for options in OPTIONS:
        masters = []
        for shared in (False, True):
            comm = communicator(shared=shared)
            run = Run("transformer", steps=3, accumulation=2, unequal_weights=True, options={**options, "comm": comm})
            masters.append(train(rank, world, run).masters)
            assert isinstance(comm, HostMemory) == shared
            if isinstance(comm, HostMemory):
                assert not comm.memory.unsupported_reason, "no silent fallback"
        runs.append(masters)
    return runs


@pytest.mark.parametrize("world", [2, 3])
def test_training_has_the_same_bits(world: int) -> None:
    for options, (through_sockets, in_place) in zip(OPTIONS, run_ranks(world, train_with_and_without)[0], strict=True):
        assert through_sockets
        for key, tensor in through_sockets.items():
            assert torch.equal(in_place[key], tensor), f"{options}: {key}"


class Deep(nn.Module):
    """More blocks than the ring holds, used in any order; the head is used first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(33, 33) for _ in range(8))
        self.head = nn.Linear(33, 33)

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        x = self.head(x)
        for index in order:
            x = x + self.blocks[index](x).tanh()
        return self.head(x).float().square().mean()


def train_deep(rank: int, world: int, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Gradients reuse the ring; those out of order lie in private memory first; ranks run at their own speed."""
    host_memory.MAX_BYTES_IN_FLIGHT = 1
    masters = []
    for shared in (False, True):
        torch.manual_seed(0)
        rng = random.Random(rank)
        engine = dtrain.initialize(Deep(), seed=0, comm=communicator(shared=shared), **options)
        assert isinstance(engine, NativeEngine)
        assert isinstance(engine.sharded.reducer.exchange, RingExchange) == shared
        master = next(engine.local_shards("master")).data
        assert is_shared(engine.comm, master) == (shared and "zero_stage" in options)
        for step in range(6):
            order = list(range(8)) if step % 2 else [3, 1, 7, 0, 2, 6, 5, 4]
            for micro in engine.accumulate(range(3)):
                torch.manual_seed(100 * step + 10 * micro + rank)
                time.sleep(0.004 * rng.random())
                engine.backward(engine(torch.randn(4, 33), order=order), weight=1.0 + micro)
            engine.step()
        masters.append(engine.master_state())
    return masters


@pytest.mark.parametrize(
    "options", [{"precision": "bf16"}, {"precision": "fp32", "zero_stage": 3}], ids=["ring", "masters"]
)
def test_buffers_that_are_reused_many_times(options: dict[str, Any]) -> None:
    through_sockets, in_place = run_ranks(2, train_deep, options)[0]
    for key, tensor in through_sockets.items():
        assert torch.equal(in_place[key], tensor), key
