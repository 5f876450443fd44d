"""The ring buffer: no slot is written before all ranks have read it, and no rank deadlocks."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain.distributed.communicator import GradientHandle, GradientSend
from dtrain.distributed.schedule import CollectiveSchedule
from dtrain.distributed.transport.ring import RingSchedule
from dtrain.distributed.transport.ring_exchange import RingExchange

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=9)


@settings(max_examples=100)
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
    # a send finishes what frees the slot of the next gradient; the last ones are opened early and may not find it free
    finished = -1
    for number, slot in enumerate(slots):
        if len(sizes) > 1 and number % len(sizes) < len(sizes) - num_last:
            assert slot.free_after <= finished
        first = schedule.finish_first(number)
        assert first < number
        finished = max(finished, first)
        schedule.forget(number - 2 * schedule.window)


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


class Posted:
    """An announced gradient; complete when all ranks have announced theirs, and read while other ranks run."""

    def __init__(self, comm: Ranks, board: dict[int, tuple[Tensor, int]], part: slice) -> None:
        self._comm = comm
        self._board = board
        self._part = part

    def wait(self) -> tuple[list[Tensor], list[int]]:
        comm = self._comm
        comm.interleaving.pause(comm.rank, lambda: len(self._board) == comm.world_size)
        tensors, weights = zip(*(self._board[rank] for rank in range(comm.world_size)), strict=True)
        return [tensor[self._part] for tensor in tensors], list(weights)


class Ranks:
    """A communicator whose ranks are interleaved threads."""

    device = torch.device("cpu")

    def __init__(
        self, rank: int, world_size: int, interleaving: Interleaving, board: list[dict[int, tuple[Tensor, int]]]
    ) -> None:
        self.rank, self.world_size, self.interleaving, self.board = rank, world_size, interleaving, board
        self.schedule = CollectiveSchedule()

    def announce(self, what: str, tensor: Tensor, weight: int, *, part: Tensor) -> Posted:
        number = self.schedule.num_issued - 1
        while len(self.board) <= number:
            self.board.append({})
        self.board[number][self.rank] = (tensor, weight)
        start = int(part.storage_offset() - tensor.storage_offset())
        return Posted(self, self.board[number], slice(start, start + part.numel()))


CHUNK = 12  # elements, divisible by 2 and 3 ranks
PADDING = 5  # at the end; a gap of one element lies in the middle


def simulate(
    chunks: list[int], num_last: int, window_bytes: int, world: int, seed: int, micro_batches: int = 4
) -> None:
    """All ranks fill, send and check stamped gradients, in random order and at random speed."""
    sends = []
    for number, count in enumerate(chunks):
        stop = count * CHUNK * world - PADDING
        sends.append(GradientSend(f"g{number}", count * CHUNK * world, torch.float32, ((0, 3), (4, stop))))
    interleaving, board = Interleaving(seed), list[dict[int, tuple[Tensor, int]]]()

    def program(rank: int) -> Callable[[], None]:
        rng = random.Random(1000 * seed + rank)
        comm: Any = Ranks(rank, world, interleaving, board)
        schedule = RingSchedule([send.nbytes for send in sends], num_last, window_bytes)
        memory = torch.full((schedule.capacity // 4,), torch.nan).view(torch.uint8)
        exchange = RingExchange(comm, sends, memory, schedule)
        in_flight: deque[tuple[GradientHandle, int, float, int]] = deque()

        def finish() -> None:
            handle, index, stamp, micro_batch = in_flight.popleft()
            rows, weights = handle.wait()
            assert weights.tolist() == [micro_batch + other / 8 for other in range(world)]
            whole = torch.zeros(sends[index].numel)
            for start, stop in sends[index].filled:
                whole[start:stop] = 1.0
            shard = whole.view(world, -1)[rank]
            for other, row in enumerate(rows):
                interleaving.pause(rank)
                assert torch.equal(row, shard * (stamp + other / 16)), "overwritten before it was read"
            handle.release()

        def launch(index: int, stamp: float, micro_batch: int) -> None:
            while in_flight and in_flight[0][0].number <= exchange.finish_first():
                finish()
            in_flight.append((exchange.send(index), index, stamp, micro_batch))

        def body() -> None:
            for micro_batch in range(micro_batches):
                exchange.begin(torch.tensor(micro_batch + rank / 8))
                order = list(range(len(chunks)))
                order = order[len(order) - num_last :] + order[: len(order) - num_last]
                if rng.random() < 0.3:
                    rng.shuffle(order)
                opened: set[int] = set()
                launched = 0
                for index in order:
                    gradient = exchange.open(index)
                    interleaving.pause(rank)
                    for start, stop in sends[index].filled:
                        gradient[start:stop] = 1.0 + micro_batch * len(chunks) + index + rank / 16
                    opened.add(index)
                    while launched in opened and (index != order[-1] or launched < len(chunks)):
                        interleaving.pause(rank)
                        launch(launched, 1.0 + micro_batch * len(chunks) + launched, micro_batch)
                        launched += 1
                    if in_flight and rng.random() < 0.3:
                        finish()
            while in_flight:
                finish()

        return body

    interleaving.run([program(rank) for rank in range(world)])


@settings(max_examples=20)
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
    slot, finish_first = RingSchedule.slot, RingSchedule.finish_first
    if broken == "slots are free at once":
        patch = mock.patch.object(RingSchedule, "slot", lambda *args: replace(slot(*args), free_after=-1))
    else:
        patch = mock.patch.object(RingSchedule, "finish_first", lambda *args: finish_first(*args) - 2)

    def search() -> None:
        for seed in range(40):
            simulate([1, 1, 1, 1, 1, 1], 1, 2 * 4 * CHUNK * 2, 2, seed)

    with patch, pytest.raises(AssertionError, match="overwritten before it was read"):
        search()


def test_a_send_or_a_release_that_breaks_the_rule_is_refused() -> None:
    sends = [GradientSend(name, 16, torch.float32, ((0, 16),)) for name in "ab"]
    schedule = RingSchedule([send.nbytes for send in sends], 0, 1)
    comm: Any = Ranks(0, 1, Interleaving(0), [])
    comm.interleaving.pause = lambda *_: None
    exchange = RingExchange(comm, sends, torch.zeros(schedule.capacity, dtype=torch.uint8), schedule)
    exchange.begin(torch.ones(()))
    handles = []
    for number in range(2):
        exchange.open(number)
        handles.append(exchange.send(number))
    exchange.open(0)
    assert exchange.finish_first() >= 0
    with pytest.raises(RuntimeError, match="send 2 starts before finish_first: 0 sends are finished"):
        exchange.send(0)
    with pytest.raises(RuntimeError, match="send 1 is released before send 0"):
        handles[1].release()
