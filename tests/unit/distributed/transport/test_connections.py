"""Small messages between ranks, here threads: every rank gets those of all, no rank deadlocks, failures are named."""

from __future__ import annotations

import fcntl
import gc
import itertools
import mmap
import os
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.distributed.processes import open_descriptor
from dtrain.distributed.schedule import Collective
from dtrain.distributed.transport import pipes, sockets
from dtrain.distributed.transport.connections import Connections
from dtrain.distributed.transport.messages import MAX_PAYLOAD_BYTES, Message
from dtrain.distributed.transport.pipes import Pipes
from dtrain.distributed.transport.sockets import Sockets
from dtrain.errors import CommunicationError, DivergenceError, DtrainError

ROW = Collective(1, "row", 17)


def on_threads(world: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(work, range(world)))


KINDS: tuple[type[Connections], ...] = (Pipes, Sockets)
both = pytest.mark.parametrize("kind", KINDS)


def open_ranks(kind: type[Connections], world: int, timeout_s: float = 5.0) -> list[Connections]:
    """Returns the connections of all ranks."""
    texts = [""] * world
    barrier = threading.Barrier(world, timeout=20.0)

    def open_rank(rank: int) -> Connections:
        def exchange_text(text: str) -> list[str]:
            texts[rank] = text
            barrier.wait()
            received = list(texts)
            barrier.wait()
            return received

        opened = kind(rank, world, timedelta(seconds=timeout_s))
        opened.open(exchange_text)
        return opened

    return on_threads(world, open_rank)


@contextmanager
def pages_of_new_pipes(pages: int) -> Iterator[None]:
    """Makes new pipes smaller, as those of a user who has many."""
    real = os.pipe2

    def small(flags: int) -> tuple[int, int]:
        ends = real(flags)
        fcntl.fcntl(ends[0], fcntl.F_SETPIPE_SZ, pages * mmap.PAGESIZE)
        return ends

    with mock.patch.object(os, "pipe2", small):
        yield


def payload(rank: int, number: int, size: int) -> bytes:
    return random.Random(100 * number + rank).randbytes(size)


@settings(max_examples=30)
@given(
    st.sampled_from(KINDS),
    st.integers(2, 4),
    st.sampled_from([1, 2, 16]),
    st.lists(st.integers(0, 40) | st.integers(0, MAX_PAYLOAD_BYTES) | st.just(MAX_PAYLOAD_BYTES), max_size=70),
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=4, max_size=4),
    st.integers(0, 1000),
)
def test_every_rank_gets_all_payloads_however_sends_and_receives_alternate(
    kind: type[Connections], world: int, pages: int, sizes: list[int], chances: list[float], seed: int
) -> None:
    """Rank r receives one of its messages after a send with chance ``chances[r]``, and at the end the others."""
    with pages_of_new_pipes(pages):
        ranks = open_ranks(kind, world)

    def work(rank: int) -> None:
        rng = random.Random(seed + rank)
        pending: list[tuple[int, Message]] = []

        def receive_one() -> None:
            number, message = pending.pop(rng.randrange(len(pending)))
            expected = [payload(other, number, sizes[number]) for other in range(world)]
            assert ranks[rank].receive(message) == expected
            assert ranks[rank].receive(message) == expected, "a message that was received can be asked for again"

        for number, size in enumerate(sizes):
            pending.append((number, ranks[rank].send(ROW, payload(rank, number, size))))
            assert len(ranks[rank]._in_flight) <= ranks[rank]._max_in_flight
            if rng.random() < chances[rank]:
                receive_one()
        while pending:
            receive_one()

    on_threads(world, work)
    for rank in ranks:
        rank.release()


@both
def test_longer_messages_are_refused(kind: type[Connections]) -> None:
    first, second = open_ranks(kind, 2)
    with pytest.raises(ValueError, match=f"at most {MAX_PAYLOAD_BYTES} bytes; got {MAX_PAYLOAD_BYTES + 1}"):
        first.send(ROW, bytes(MAX_PAYLOAD_BYTES + 1))
    assert first.send(ROW, bytes(MAX_PAYLOAD_BYTES)).header == second.send(ROW, bytes(MAX_PAYLOAD_BYTES)).header


@both
@pytest.mark.parametrize("has_sent", [True, False])
def test_an_ended_rank_is_named_after_what_it_sent_was_received(kind: type[Connections], has_sent: bool) -> None:
    first, second, third = open_ranks(kind, 3)
    messages = [first.send(ROW, b"first"), third.send(ROW, b"third")]
    if has_sent:
        second.send(ROW, b"other")
    second.release()
    if has_sent:
        assert first.receive(messages[0]) == third.receive(messages[1]) == [b"first", b"other", b"third"]
        messages = [first.send(ROW, b"more"), third.send(ROW, b"more")]
    for rank, message in zip((first, third), messages, strict=True):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"^rank 1 has ended$"):
                rank.receive(message)


@pytest.mark.parametrize(
    ("what", "size", "first_at", "second_at"),
    [
        (Collective(1, "ready", 17), 4, "row", "ready"),
        (Collective(2, "row", 17), 4, "row (number 1, order 11, 4 B)", "row (number 2, order 11, 4 B)"),
        (Collective(1, "row", 16), 4, "row (number 1, order 11, 4 B)", "row (number 1, order 10, 4 B)"),
        (ROW, 3, "row (number 1, order 11, 4 B)", "row (number 1, order 11, 3 B)"),
        (ROW, 0, "row (number 1, order 11, 4 B)", "row (number 1, order 11, 0 B)"),
    ],
)
def test_other_messages_fail_before_more_bytes_come(what: Collective, size: int, first_at: str, second_at: str) -> None:
    first, second = open_ranks(Pipes, 2)
    message = first.send(ROW, b"1234")
    other = second.send(what, bytes(size))
    for rank, sent in ((first, message), (second, other)):
        with pytest.raises(DivergenceError, match=re.escape(f"rank 0 is at {first_at}, rank 1 is at {second_at};")):
            rank.receive(sent)


@both
def test_a_message_that_was_lost_is_an_error(kind: type[Connections]) -> None:
    first, second = open_ranks(kind, 2)
    with mock.patch.object(os, "write", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        first.send(ROW, b"1234")
    first.send(Collective(2, "row", 18), b"5678")
    message = second.send(ROW, b"1234")
    with pytest.raises(DivergenceError, match=r"rank 0 is at row \(number 2, .* rank 1 is at row \(number 1"):
        second.receive(message)


@both
@pytest.mark.parametrize("error", [DivergenceError("rank 0 saves"), CommunicationError("rank 1 has ended")])
def test_a_rank_that_fails_says_why_to_those_that_wait_and_to_those_that_come_later(
    kind: type[Connections], error: DtrainError
) -> None:
    first, second, third = open_ranks(kind, 3)
    waiting = second.send(ROW, b"1234")
    first.send(ROW, b"1234")
    first.close_failed(error)
    first.close_failed(error)
    late = third.send(ROW, b"1234")
    assert third.receive(late)
    second.receive(waiting)
    reason = f"{'' if isinstance(error, DivergenceError) else 'rank 0 has failed, so this one ends too: '}{error}$"
    for rank in (second, third):
        with pytest.raises(type(error), match=reason):
            rank.receive(rank.send(ROW, b"1234"))
        found = rank.failure_of_others()
        assert type(found) is type(error)
        assert str(found).endswith(str(error))


@both
def test_ranks_that_have_ended_without_a_failure_are_known(kind: type[Connections]) -> None:
    first, *others = open_ranks(kind, 4)
    assert first.ended_ranks() == []
    others[0].release()
    others[1].close_failed(CommunicationError("rank 1 has ended"))
    others[2].send(ROW, b"1")
    assert first.ended_ranks() == [1]


def test_waits_have_a_time_out() -> None:
    with pages_of_new_pipes(1):
        first, second, third = open_ranks(Pipes, 3, timeout_s=0.1)
    message = first.send(ROW, bytes(MAX_PAYLOAD_BYTES))
    third.send(ROW, bytes(MAX_PAYLOAD_BYTES))
    with pytest.raises(RuntimeError, match=r"^rank 1 sent no message for 0.1 s$"):
        first.receive(message)
    second.send(ROW, bytes(MAX_PAYLOAD_BYTES))
    first.receive(message)
    with pytest.raises(RuntimeError, match=r"^rank 1 read no message for 0.1 s$"):
        first.send(ROW, bytes(MAX_PAYLOAD_BYTES))


def descriptors() -> set[str]:
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


@both
def test_descriptors_are_closed(kind: type[Connections]) -> None:
    before = descriptors()
    ranks = open_ranks(kind, 3)
    ends = {end for rank in ranks for end in (*rank._readers.values(), *rank._writers.values())}
    # no rank keeps the write ends of its own pipes
    assert len(descriptors() - before) == len(ends) == (12 if kind is Pipes else 6)
    assert not any(map(os.get_inheritable, ends)), "no child program inherits one"
    ranks[0].release()
    with pytest.raises(RuntimeError, match="were released"):
        ranks[0].send(ROW, b"2")
    assert len(descriptors() - before) == (8 if kind is Pipes else 4)
    ranks.clear()
    assert descriptors() == before


@pytest.mark.parametrize(
    ("kind", "module", "name"),
    [
        (Pipes, os, "pipe2"),  # the third fails
        (Pipes, pipes, "open_descriptor"),
        (Sockets, socket, "create_server"),  # all fail
        (Sockets, socket, "create_connection"),
    ],
)
def test_a_failure_is_a_reason_on_every_rank_and_leaves_no_descriptor(kind: Any, module: Any, name: str) -> None:
    real, calls = getattr(module, name), itertools.count(1)

    def failing_call(*args: Any, **kwargs: Any) -> Any:
        if kind is Sockets or next(calls) == 3:
            raise OSError(24, "injected")
        return real(*args, **kwargs)

    before = descriptors()
    with mock.patch.object(module, name, failing_call), mock.patch.object(sockets, "_OPEN_S", 0.2):
        ranks = open_ranks(kind, 3)
    (reason,) = {rank.unsupported_reason for rank in ranks}
    assert "injected" in reason or "timed out" in reason
    with pytest.raises(RuntimeError, match=r"injected|timed out"):
        ranks[0].send(ROW, b"1")
    assert descriptors() == before


def test_another_file_is_not_opened() -> None:
    reader, writer = os.pipe()
    try:
        inode = os.fstat(writer).st_ino
        os.close(open_descriptor(os.getpid(), writer, inode, os.O_WRONLY))
        before = descriptors()
        with pytest.raises(OSError, match="is another process here"):
            open_descriptor(os.getpid(), writer, inode + 1, os.O_WRONLY)
        assert descriptors() == before
    finally:
        os.close(reader)
        os.close(writer)


def test_a_message_may_be_written_in_parts() -> None:
    first, second = open_ranks(Sockets, 2)
    real = os.write
    with mock.patch.object(os, "write", lambda end, data: real(end, data[:7])):
        message = first.send(ROW, b"1234")
    other = second.send(ROW, b"5678")
    assert first.receive(message) == second.receive(other) == [b"1234", b"5678"]


def test_a_stranger_is_no_rank() -> None:
    """Another process of the machine connects before the ranks do, with a wrong token, and with nothing."""
    real = socket.create_server
    strangers = []

    def visited(*args: Any, **kwargs: Any) -> socket.socket:
        server = real(*args, **kwargs)
        for greeting in (sockets._GREETING.pack(bytes(16), 1), b""):
            stranger = socket.create_connection(server.getsockname()[:2])
            stranger.sendall(greeting)
            stranger.shutdown(socket.SHUT_WR)
            strangers.append(stranger)
        return server

    with mock.patch.object(socket, "create_server", visited):
        first, second = open_ranks(Sockets, 2)
    second.send(ROW, b"2")
    assert first.receive(first.send(ROW, b"1")) == [b"1", b"2"]
    for stranger in strangers:
        stranger.close()


def test_the_interface_of_gloo_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    with sockets.listen_for_ranks(1) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-one")
    with pytest.raises(OSError, match="No such device"):
        sockets.listen_for_ranks(1)
    lines = ["fe800000000000000000000000000001 02 40 20 80 no-such-one", f"{1:032x} 01 80 00 80 no-such-one"]
    with mock.patch.object(sockets.Path, "read_text", return_value="\n".join(lines)):
        assert sockets.interface_address("no-such-one") == "::1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    with sockets.listen_for_ranks(1) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
