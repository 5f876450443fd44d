"""The transports behind one interface: the gradient exchange, and a second axis of a mesh."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.distributed.communicator import Communicator, GradientHandle, GradientSend
from dtrain.distributed.mesh import Mesh
from dtrain.distributed.transport import host_memory
from dtrain.distributed.transport.choose import make_communicator
from dtrain.distributed.transport.gloo_group import GlooGroup
from dtrain.distributed.transport.host_memory import HostMemory
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.errors import CommunicationError, DivergenceError
from tests.helpers.hosts import wait_for
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
both = pytest.mark.parametrize("shared", [True, False])
SENDS = [
    GradientSend("a", 24, torch.bfloat16, ((0, 20),)),
    GradientSend("b", 60, torch.float32, ((0, 7), (8, 60))),
    GradientSend("c", 12, torch.float16, ((1, 12),)),
]


def value(rank: int, micro_batch: int, index: int) -> float:
    return 1.0 + rank + 4 * micro_batch + 32 * index


def exchange_gradients(comm: Communicator, num_early: int) -> list[tuple[int, list[Tensor], list[float]]]:
    """Returns (index, shards, weights) of each send of four micro-batches with a weight for each rank."""
    exchange = comm.gradient_exchange(SENDS, num_early)
    got: list[tuple[int, list[Tensor], list[float]]] = []
    in_flight: deque[GradientHandle] = deque()

    def finish() -> None:
        handle = in_flight.popleft()
        shards, weights = handle.wait()
        again, _ = handle.wait()
        assert all(torch.equal(shard, other) for shard, other in zip(shards, again, strict=True))
        got.append((handle.number % len(SENDS), [shard.clone() for shard in shards], weights.tolist()))
        handle.release()

    for micro_batch in range(4):
        exchange.begin(torch.tensor(0.1 + comm.rank + 10 * micro_batch))
        for index in [2, 0, 1] if num_early else [0, 1, 2]:
            gradient, gap = exchange.open(index), exchange.gap(index)
            numel = SENDS[index].numel // comm.world_size
            for shard in range(comm.world_size):
                for start, stop in SENDS[index].filled:
                    start, stop = max(start, shard * numel), min(stop, (shard + 1) * numel)
                    gradient[start + shard * gap : max(start, stop) + shard * gap] = value(
                        comm.rank, micro_batch, index
                    )
        for index in range(len(SENDS)):
            while in_flight and in_flight[0].number <= exchange.finish_first():
                finish()
            in_flight.append(exchange.send(index))
    while in_flight:
        finish()
    assert exchange.idle()
    return got


def check_gradients(got: list[tuple[int, list[Tensor], list[float]]], rank: int, world: int) -> None:
    assert len(got) == 4 * len(SENDS)
    for number, (index, shards, weights) in enumerate(got):
        micro_batch, send = number // len(SENDS), SENDS[index]
        assert weights == [float(torch.tensor(0.1 + other + 10 * micro_batch)) for other in range(world)]
        for other, shard in enumerate(shards):
            whole = torch.zeros(send.numel, dtype=send.dtype)
            for start, stop in send.filled:
                whole[start:stop] = value(other, micro_batch, index)
            assert torch.equal(shard, whole.view(world, -1)[rank]), (number, other)


def exchange_over(rank: int, world: int, shared: bool) -> list[str]:
    comm = make_communicator(dist.group.WORLD if world > 1 else None, CPU, shared_memory=shared)
    assert type(comm) is (SingleRank if world == 1 else HostMemory if shared else GlooGroup)
    comm.schedule.begin_step()
    check_gradients(exchange_gradients(comm, 0), rank, world)
    log = list(comm.schedule.log)
    check_gradients(exchange_gradients(comm, 1), rank, world)
    return log


WORLDS = pytest.mark.parametrize(("world", "shared"), [(1, True), (2, True), (3, True), (3, False)])


@WORLDS
def test_every_rank_gets_its_shards_and_the_weights_of_all(world: int, shared: bool) -> None:
    logs = run_ranks(world, exchange_over, shared)
    assert all(log == logs[0] for log in logs)
    of_allocation = ("gather_rows", "exchange_text")  # of the ring's memory
    entries = [entry for entry in logs[0] if not entry.startswith(of_allocation)]
    # the weights take no collective: in shared memory they lie in the ready messages, else in gaps of the first send
    gap = 0 if shared or world == 1 else world * 64
    numels = [SENDS[0].numel + gap, *(send.numel for send in SENDS[1:])]
    sends = [
        f"all_to_all_single({send.label}, {numel} x {str(send.dtype).removeprefix('torch.')})"
        for send, numel in zip(SENDS, numels, strict=True)
    ]
    assert entries == sends * 4


def collectives_over_axes(rank: int, world: int, shared: bool) -> dict[str, Any]:
    """Runs all collectives over both axes of a 2 x 2 mesh, in flight together."""
    comm = make_communicator(dist.group.WORLD, CPU, shared_memory=shared)
    mesh = Mesh.of(comm, 2)
    axes = {"replicate": mesh.replicate, "shard": mesh.shard}
    assert all(axis.schedule is comm.schedule for axis in axes.values())
    got: dict[str, Any] = {}
    handles = []
    for name, axis in axes.items():
        shard = axis.allocate(3, torch.float32).fill_(rank)
        flat = axis.allocate(4, torch.float32)
        flat.copy_(torch.arange(4.0) + 10 * rank)
        maximum = torch.tensor([float(rank)])
        got[name] = {"gather": torch.empty(6), "sum": torch.empty(2), "max": maximum}
        handles.append(axis.all_gather(got[name]["gather"], shard, label=f"weights over {name}"))
        handles.append(axis.reduce_scatter_sum(got[name]["sum"], flat, label=f"gradients over {name}"))
        handles.append(axis.all_reduce_max(maximum, label="maximum"))
    total = torch.tensor([1.0 + rank])
    rows = comm.gather_rows(total, label="all four")
    for handle in handles:
        handle.wait()
    for name, axis in axes.items():
        source = torch.tensor([float(rank)])
        axis.broadcast(source, label="from the first")
        got[name] |= {"text": axis.exchange_text(f"rank {rank}"), "first": float(source)}
        check_gradients(exchange_gradients(axis, 1), axis.rank, 2)
    got["all"] = rows.flatten().tolist()
    got["hash"] = comm.schedule.hash
    got["in place"] = [isinstance(axis, HostMemory) for axis in axes.values()]
    comm.barrier()
    return got


@both
def test_collectives_over_two_axes_of_a_mesh(shared: bool) -> None:
    results = run_ranks(4, collectives_over_axes, shared)
    members = {"replicate": [(0, 2), (1, 3)], "shard": [(0, 1), (2, 3)]}
    for rank, got in enumerate(results):
        assert got["all"] == [1.0, 2.0, 3.0, 4.0]
        assert got["hash"] == results[0]["hash"]
        assert got["in place"] == [shared, shared]
        for name, groups in members.items():
            first, second = pair = next(pair for pair in groups if rank in pair)
            found = got[name]
            assert found["gather"].tolist() == [first] * 3 + [second] * 3
            start = 2 * pair.index(rank)
            assert found["sum"].tolist() == [2.0 * e + 10 * (first + second) for e in range(start, start + 2)]
            assert found["max"].item() == second
            assert found["text"] == [f"rank {first}", f"rank {second}"]
            assert found["first"] == first


def published_shards(rank: int, world: int, shared: bool) -> tuple[list[list[float]], list[int]]:
    """Returns what two all-gathers after each of two publications give, and how many ready messages each took."""
    sent: list[int] = []
    send = host_memory._ReadyMessage.send

    def count(message: host_memory._ReadyMessage) -> None:
        sent.append(len(message.entries))
        send(message)

    comm = make_communicator(dist.group.WORLD, CPU, shared_memory=shared)
    shards = [comm.allocate(numel, torch.float32) for numel in (4, 6)]
    got, num_sent = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory._ReadyMessage, "send", count)
        for value in (1.0, 10.0):
            comm.barrier()
            for shard in shards:
                shard.fill_(value + rank)
            comm.publish(shards)
            num_sent.append(len(sent))
            for shard in (*shards, *shards, shards[0][:2]):
                output = torch.empty(world * shard.numel())
                comm.all_gather(output, shard, label="g").wait()
                got.append(output[:: shard.numel()].tolist())
            num_sent.append(len(sent))
    return got, num_sent


@both
def test_published_shards_are_announced_once(shared: bool) -> None:
    for got, num_sent in run_ranks(2, published_shards, shared):
        assert got == [[1.0, 2.0]] * 5 + [[10.0, 11.0]] * 5
        # a part of a published shard is another buffer, with a message of its own
        assert num_sent == ([1, 2, 3, 4] if shared else [0, 0, 0, 0])


def gathered_sums(rank: int, world: int, shared: bool, dtype: torch.dtype) -> list[tuple[bool, Tensor]]:
    """Sums of two buffers that every rank holds whole, twice; and whether no other rank wrote too early or too late."""
    comm = make_communicator(dist.group.WORLD, CPU, shared_memory=shared)
    flats = [comm.allocate(world * numel, torch.float32) for numel in (3, 200_000)]
    found = []
    for repeat in range(2):
        comm.barrier()  # stands for the vote: no rank writes a buffer that another one may still read
        for number, flat in enumerate(flats):
            flat.copy_(torch.randn(flat.numel(), generator=torch.Generator().manual_seed(10 * repeat + number + rank)))
        own = [flat.view(world, -1)[rank] for flat in flats]
        sums = [
            comm.reduce_scatter_sum(shard, flat, label="sum", dtype=dtype, gathers=True)
            for shard, flat in zip(own, flats, strict=True)
        ]
        for handle in sums:
            handle.wait()
        shards = [shard.clone() for shard in own]
        gathers = [comm.all_gather(flat, shard, label="sums") for shard, flat in zip(own, flats, strict=True)]
        for handle in gathers:
            handle.wait()
        kept = all(torch.equal(shard, before) for shard, before in zip(own, shards, strict=True))
        found += [(kept, flat.clone()) for flat in flats]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_that_every_rank_needs_are_equal_through_memory_and_sockets(dtype: torch.dtype) -> None:
    through_memory, through_sockets = (run_ranks(3, gathered_sums, shared, dtype) for shared in (True, False))
    for in_memory, in_sockets in zip(through_memory, through_sockets, strict=True):
        for (kept, got), (_, want), (_, first) in zip(in_memory, in_sockets, through_memory[0], strict=True):
            assert kept
            assert torch.equal(got, want)
            assert torch.equal(got, first)
    terms = [torch.randn(9, generator=torch.Generator().manual_seed(rank)).to(dtype).float() for rank in range(3)]
    assert torch.equal(through_memory[0][0][1], (terms[0] + terms[1]) + terms[2])


SIZES = {1: [[5]], 2: [[3, 0], [65, 2]], 3: [[0, 7, 33], [0, 0, 0], [129, 0, 4]]}
"""Elements of an all-to-all by sender and receiver."""


def parts_of_all(rank: int, world: int, shared: bool, dtype: torch.dtype) -> tuple[list[list[float]], list[str]]:
    """Returns what two rounds of an uneven all-to-all bring, and the schedule's entries."""
    comm = make_communicator(dist.group.WORLD if world > 1 else None, CPU, shared_memory=shared)
    sent, received = SIZES[world][rank], [row[rank] for row in SIZES[world]]
    allocated = comm.allocate(max(map(sum, SIZES[world])) + 3, torch.float32).view(dtype)
    source, target = allocated[2 : 2 + sum(sent)], torch.empty(sum(received), dtype=dtype)
    comm.schedule.begin_step()
    found = []
    for turn in range(2):
        # e.g. 12: the first round's, of rank 0 to rank 2
        values = [torch.full((n,), 10.0 * (10 * turn + rank) + to) for to, n in enumerate(sent)]
        source.copy_(torch.cat(values))
        handle = comm.all_to_all(
            target, source, received, sent, total=sum(map(sum, SIZES[world])), label=f"round {turn}"
        )
        handle.wait()
        handle.wait()
        found.append(target.float().tolist())
        comm.gather_rows(torch.zeros(1), label="vote")
    return found, list(comm.schedule.log)


@WORLDS
def test_every_rank_gets_its_parts_of_uneven_and_empty_sizes(world: int, shared: bool) -> None:
    name = "bfloat16" if shared else "float32"
    results = run_ranks(world, parts_of_all, shared, getattr(torch, name))
    total = sum(map(sum, SIZES[world]))
    for rank, (found, log) in enumerate(results):
        for turn in range(2):
            parts = [[10.0 * (10 * turn + sender) + rank] * row[rank] for sender, row in enumerate(SIZES[world])]
            assert found[turn] == list(chain.from_iterable(parts))
        # the same on all ranks, for the vote compares them
        entries = [entry for entry in log if not entry.startswith("gather_rows")]
        assert entries == [f"all_to_all(round {turn}, {total} x {name})" for turn in range(2)]


def unequal(rank: int, world: int) -> tuple[str, str]:
    """Returns the errors of ranks that allow different transports, and of parts that the other does not send."""
    with pytest.raises(DivergenceError) as transport:
        make_communicator(dist.group.WORLD, CPU, shared_memory=rank != 1)
    comm = make_communicator(dist.new_group(), CPU, shared_memory=True)
    received, sent = [[1, 1], [3, 1]][rank], [[1, 2], [1, 1]][rank]  # rank 0 sends two, rank 1 expects three
    source, target = comm.allocate(4, torch.float32)[: sum(sent)], torch.empty(sum(received))
    handle = comm.all_to_all(target, source, received, sent, total=5, label="moves")
    try:
        handle.wait()
    except DivergenceError as error:
        return str(transport.value), str(error)
    return str(transport.value), ""


def test_unequal_transports_and_parts_are_errors() -> None:
    results = run_ranks(2, unequal)
    message = "shared memory between ranks is allowed: True on rank 0, False on rank 1; give all ranks the same"
    assert [transport for transport, _ in results] == [message] * 2
    assert "expects 3 elements of rank 0, and met number" in results[1][1]


def wait_twice(rank: int, world: int, shared: bool) -> list[str]:
    """Collectives of each kind are in flight when rank 1 issues another one; each is waited for twice."""
    comm = make_communicator(dist.group.WORLD, CPU, shared_memory=shared)
    exchange = comm.gradient_exchange(SENDS, 0)
    exchange.begin(torch.tensor(1.0))
    exchange.open(0)
    flat, output = comm.allocate(4 * world, torch.float32), torch.full((4 * world,), 7.0)
    parts = [2] * world
    source = comm.allocate(2 * world, torch.float32)
    starts: list[Callable[[], Any]] = [
        lambda: comm.all_gather(output, flat[:4], label="other" if rank else "weights"),
        comm.flush,
        lambda: comm.reduce_scatter_sum(torch.empty(4), flat, label="sum"),
        lambda: comm.all_to_all(torch.empty(2 * world), source, parts, parts, total=2 * world * world, label="parts"),
        lambda: comm.all_reduce_max(torch.zeros(3), label="maximum"),
        lambda: exchange.send(0),
    ]
    failed: list[str] = []

    def attempt(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except DivergenceError as error:
            failed.append(str(error))

    handles = [handle for handle in map(attempt, starts) if handle is not None]
    for work in (*(handle.wait for handle in handles * 2), comm.barrier, lambda: comm.exchange_text("text")):
        before = len(failed)
        attempt(work)
        assert len(failed) == before + 1, "each wait and each new collective fails"
    assert output.eq(7).all(), "nothing of a failed collective is used"
    assert handles or not shared, "without shared memory the first may fail when it is issued"
    return failed


@both
def test_a_collective_that_failed_is_never_read_and_its_error_is_kept(shared: bool) -> None:
    first, second = run_ranks(2, wait_twice, shared)
    assert {*first, *second} == {first[0]}
    assert "rank 0 is at all_gather(weights, 8 x float32)" in first[0]
    assert "rank 1 is at all_gather(other, 8 x float32)" in first[0]


def late(rank: int, world: int, shared: bool, read: Path) -> str:
    """Rank 0 fails, and its process lives on: rank 1 waits for it, then gets to its collective."""
    comm = make_communicator(dist.group.WORLD, CPU, shared_memory=shared)
    if rank == 0:
        time.sleep(0.3)
        for transport in list(comm.schedule.transports):
            transport.close_failed(CommunicationError("no memory"))
        wait_for(read)
        return ""
    with pytest.raises(RuntimeError):  # a call of the user's, which waits in gloo
        dist.all_reduce(torch.ones(1))
    with pytest.raises(CommunicationError) as caught:
        comm.all_gather(torch.empty(2), torch.zeros(1), label="weights").wait()
    read.touch()
    return str(caught.value)


@pytest.mark.parametrize("shared", [True, False])
def test_a_rank_that_comes_late_reads_why_another_has_failed(shared: bool, tmp_path: Path) -> None:
    (_, message) = run_ranks(2, late, shared, tmp_path / "read")
    assert message == "rank 0 has failed, so this one ends too: no memory"
