"""The ring buffer: no slot is written before all ranks have read it, and no rank deadlocks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain.distributed.communicator import Pending
from dtrain.sharding import micro_batch_gradients
from dtrain.sharding.layout import CHUNK, ParamSpec, flat_layouts
from dtrain.sharding.micro_batch_gradients import MicroBatchGradientBuffers, MicroBatchGradientSpec
from dtrain.sharding.ring_buffer import RingBuffer, RingSchedule, RingSlot

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=9)


@settings(deadline=None, max_examples=200)
@given(sizes, st.integers(0, 3), st.integers(1, 120))
def test_live_slots_never_overlap(sizes: list[int], num_last: int, limit: int) -> None:
    num_last = min(num_last, len(sizes))
    schedule = RingSchedule(sizes, num_last, limit)
    assert schedule.capacity <= 2 * sum(sizes)
    assert 1 <= schedule.window <= len(sizes)
    slots = [schedule.slot(number) for number in range(6 * len(sizes))]
    for number, slot in enumerate(slots):
        assert slot.stop - slot.start == sizes[number % len(sizes)]
        assert 0 <= slot.start < slot.stop <= schedule.capacity
        earlier = [n for n in range(number) if slots[n].start < slot.stop and slot.start < slots[n].stop]
        # exact: free after the latest send that used it, so a gradient opened in order never needs private memory
        assert slot.free_after == (earlier[-1] + schedule.window if earlier else -1)
        assert slot.free_after < number


def test_large_models_need_no_more_than_the_window() -> None:
    schedule = RingSchedule([10] * 50 + [30], 1, 40)
    assert schedule.window == 2  # with the last one, of 30, three are too many
    assert schedule.capacity == (2 + 2) * 10 + 10 + 2 * 30


class Interleaving:
    """Runs one of several threads at a time, chosen at random among those that need not wait."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._ready: dict[int, Callable[[], bool]] = {}
        self._wake: dict[int, threading.Semaphore] = {}
        self._paused = threading.Semaphore(0)
        self.failures: list[BaseException] = []

    def pause(self, rank: int, ready: Callable[[], bool] = lambda: True) -> None:
        """Called by a thread: runs others until this one is ``ready()`` and chosen again."""
        self._ready[rank] = ready
        self._paused.release()
        assert self._wake[rank].acquire(timeout=20)
        if self.failures:
            raise SystemExit

    def run(self, programs: Sequence[Callable[[], None]]) -> None:
        def body(rank: int, program: Callable[[], None]) -> None:
            try:
                self.pause(rank)
                program()
            except BaseException as error:
                self.failures.append(error)
            self._ready.pop(rank, None)
            self._paused.release()

        threads = []
        for rank, program in enumerate(programs):
            self._wake[rank] = threading.Semaphore(0)
            threads.append(threading.Thread(target=body, args=(rank, program), daemon=True))
            threads[-1].start()
            self._paused.acquire()
        while self._ready:
            runnable = [rank for rank, ready in sorted(self._ready.items()) if self.failures or ready()]
            assert runnable, "deadlock"
            rank = self._random.choice(runnable)
            self._wake[rank].release()
            self._paused.acquire()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]


class AllToAll(Pending):
    """Complete when all ranks have posted theirs; then the shards are read, while other ranks run."""

    def __init__(self, comm: Ranks, number: int, consume: Callable[[Sequence[Tensor]], None]) -> None:
        super().__init__()
        board = comm.board[number]
        self.then(lambda: comm.interleaving.pause(comm.rank, lambda: len(board) == comm.world_size))
        self.then(
            lambda: consume([board[rank].view(comm.world_size, -1)[comm.rank] for rank in range(comm.world_size)])
        )


class Ranks:
    """A communicator whose ranks are interleaved threads."""

    may_share = True
    device = torch.device("cpu")

    def __init__(self, rank: int, world_size: int, interleaving: Interleaving, board: list[dict[int, Tensor]]) -> None:
        self.rank, self.world_size, self.interleaving, self.board = rank, world_size, interleaving, board
        self._issued = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def is_shared(self, tensor: Tensor) -> bool:
        return True

    def all_to_all_single(self, flat: Tensor, consume: Callable[[Sequence[Tensor]], None], *, label: str) -> Pending:
        while len(self.board) <= self._issued:
            self.board.append({})
        self.board[self._issued][self.rank] = flat
        self._issued += 1
        return AllToAll(self, self._issued - 1, consume)


def simulate(
    chunks: list[int], num_last: int, window_bytes: int, world: int, seed: int, micro_batches: int = 4
) -> None:
    """All ranks fill, send and check stamped gradients, in random order and at random speed."""
    specs = []
    for number, count in enumerate(chunks):
        shape = (count * CHUNK - 5,)  # with padding, which must be zero
        (layout,) = flat_layouts(f"g{number}", [ParamSpec("w", shape, torch.float32, True)], world)
        specs.append(MicroBatchGradientSpec(layout, torch.float32))
    interleaving, board = Interleaving(seed), list[dict[int, Tensor]]()

    def program(rank: int) -> Callable[[], None]:
        rng = random.Random(1000 * seed + rank)
        comm = Ranks(rank, world, interleaving, board)
        with mock.patch.object(micro_batch_gradients, "MAX_BYTES_IN_FLIGHT", window_bytes):
            gradients = MicroBatchGradientBuffers(comm, specs, num_last)  # type: ignore[arg-type]
        pending: list[Pending] = []

        def launch(index: int, gradient: Tensor, stamp: int) -> None:
            def consume(rows: Sequence[Tensor]) -> None:
                whole = torch.zeros(specs[index].layout.numel)
                whole[: chunks[index] * CHUNK - 5] = 1.0
                for other, row in enumerate(rows):
                    interleaving.pause(rank)
                    start, stop = specs[index].layout.shard(rank)
                    assert torch.equal(row, whole[start:stop] * (stamp + other / 16)), "overwritten before it was read"

            pending.append(gradients.buffers[index].send(gradient, consume))

        def body() -> None:
            for micro_batch in range(micro_batches):
                order = list(range(len(chunks)))
                order = order[len(order) - num_last :] + order[: len(order) - num_last]
                if rng.random() < 0.3:
                    rng.shuffle(order)
                opened: dict[int, Tensor] = {}
                launched = 0
                for index in order:
                    gradient = gradients.buffers[index].open()
                    interleaving.pause(rank)
                    gradient[: chunks[index] * CHUNK - 5] = 1.0 + micro_batch * len(chunks) + index + rank / 16
                    opened[index] = gradient
                    while launched in opened and (index != order[-1] or launched < len(chunks)):
                        interleaving.pause(rank)
                        launch(launched, opened.pop(launched), 1 + micro_batch * len(chunks) + launched)
                        launched += 1
                    if pending and rng.random() < 0.3:
                        pending.pop(0).wait()
            for work in pending:
                work.wait()

        return body

    interleaving.run([program(rank) for rank in range(world)])


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.integers(0, 2),
    st.integers(1, 20),
    st.integers(2, 3),
    st.integers(0, 2**20),
)
def test_nothing_is_overwritten_before_all_have_read_it(
    chunks: list[int], num_last: int, window_chunks: int, world: int, seed: int
) -> None:
    simulate(chunks, min(num_last, len(chunks)), window_chunks * 4 * CHUNK * world, world, seed)


@pytest.mark.parametrize("broken", ["slots are free at once", "a rank runs ahead of its window"])
def test_a_broken_rule_is_found(broken: str) -> None:
    """Control: without either half of the rule, some simulation reads an overwritten gradient."""
    original = RingSchedule.slot

    def free_at_once(self: RingSchedule, number: int) -> RingSlot:
        slot = original(self, number)
        return RingSlot(slot.start, slot.stop, -1)

    wait_for = RingBuffer._wait_for
    if broken == "slots are free at once":
        patch = mock.patch.object(RingSchedule, "slot", free_at_once)
    else:
        patch = mock.patch.object(RingBuffer, "_wait_for", lambda self, number: wait_for(self, number - 2))

    def search() -> None:
        for seed in range(40):
            simulate([1, 1, 1, 1, 1, 1], 1, 2 * 4 * CHUNK * 2, 2, seed)

    with patch, pytest.raises(AssertionError, match="overwritten before it was read"):
        search()
