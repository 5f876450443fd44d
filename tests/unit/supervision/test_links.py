"""Messages between the watchers of several hosts, and the failures of other hosts that end the ranks of this one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dtrain.distributed.progress import Phase
from dtrain.supervision.hang import CRASH_S, Hang, Limit, find_failure_elsewhere, with_silent_hosts
from dtrain.supervision.links import HEARTBEAT_S, HostFailure, HostLinks, LinkJob, RanksOfHost
from dtrain.supervision.member import WatchJob
from tests.unit.supervision.test_hang import running, waiting

HOSTS = (RanksOfHost("alpha", (0, 1)), RanksOfHost("beta", (2, 3)), RanksOfHost("gamma", (4,)))
LIMIT = Limit(60.0, "supervise.limit_s")
STRANGE = [b'{"token": "\\ud800"}\n', b"[" * 190 + b"\n", b"[" * 60000 + b"\n", b"x" * 300, b"7\n", b"\xff\n"]


def job(index: int, listener: socket.socket, token: str = "secret") -> LinkJob:
    address, port = listener.getsockname()
    return LinkJob(HOSTS, index, address, port, token, listener.fileno() if index == 0 else None)


@pytest.fixture
def links() -> Iterator[list[HostLinks]]:
    """The links of three hosts, connected at time 0."""
    listener = socket.create_server(("127.0.0.1", 0))
    opened = [HostLinks(job(index, listener), 0.0) for index in range(3)]
    listener.detach()  # it is the first host's
    for _ in range(3):
        for link in opened:
            link.poll(0.0)
    yield opened
    for link in opened:
        link.close()


def test_a_host_that_sends_no_heartbeat_is_silent(links: list[HostLinks]) -> None:
    hub, beta, gamma = links
    for now in (HEARTBEAT_S, 2 * HEARTBEAT_S, 3 * HEARTBEAT_S):
        beta.poll(now)
        hub.poll(now)
        gamma.poll(0.0)  # receives, and is due to send nothing
    assert hub.silent(2.5, 2.0) == [HOSTS[2]]
    assert beta.silent(3.5, 1.0) == gamma.silent(0.5, 1.0) == []
    hub.reset_silence(2.5)
    assert hub.silent(2.5, 2.0) == []
    gamma.close()  # the run is over there
    hub.poll(3.0)
    assert hub.silent(99.0, 2.0) == [HOSTS[1]]
    assert (hub.endings(), hub.notices) == (["the run is over on gamma (rank 4)"], [])


def test_a_connection_that_ends_is_no_silence(links: list[HostLinks]) -> None:
    """The host is up: its kernel has closed the connection."""
    links[1]._connections[0].close()
    for now in (1.0, 99.0):
        links[0].poll(now)
    assert links[0].silent(99.0, 2.0) == [HOSTS[2]]
    assert links[0].endings() == ["the watcher of beta (ranks 2-3) has ended"]
    assert links[0].notices == [
        "the connection to the watcher of beta (ranks 2-3) has ended, so this host does not see whether beta is up"
    ]


def test_a_connection_lost_without_its_end_is_silence(links: list[HostLinks], monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def recv(self, _: int) -> bytes:
            raise TimeoutError  # the kernel has sent again for too long

        def send(self, _: bytes) -> int:
            raise BlockingIOError

        def close(self) -> None: ...

    (beta,) = (c for c in links[0]._connections if c.host == 1)
    assert beta.socket is not None
    beta.socket.close()
    monkeypatch.setattr(beta, "socket", Lost())
    links[0].poll(3.0)
    assert HOSTS[1] in links[0].silent(3.0, 2.0)
    assert links[0].endings() == links[0].notices == []


@pytest.mark.parametrize("line", STRANGE, ids=len)
def test_no_bytes_of_a_stranger_end_the_watcher(line: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    hub = HostLinks(job(0, listener), 0.0)
    with socket.create_connection(listener.getsockname(), timeout=5) as stranger:
        listener.detach()
        stranger.sendall(line)
        for _ in range(3):
            hub.poll(0.0)
        assert hub._connections == []
    hub.close()


def test_idle_connections_leave_room_and_missing_hosts_are_named() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    hub = HostLinks(job(0, listener), 0.0)
    idle = [socket.create_connection(listener.getsockname(), timeout=5) for _ in range(6)]
    gamma = HostLinks(job(2, listener), 0.0)
    hub.poll(0.0)
    assert len(hub._connections) == 2 * len(HOSTS)
    for now in (6.0, 6.1, 6.2):
        hub.poll(now)
    assert [connection.host for connection in hub._connections] == [2]
    assert hub.notices == []
    for now in (31.0, 32.0):
        hub.poll(now)
    (notice,) = hub.notices
    assert notice == "the watcher of beta (ranks 2-3) has not connected, so this host does not see whether beta is up"
    for connection in idle:
        connection.close()
    listener.detach()
    gamma.close()
    hub.close()


def shrink_buffers(links: list[HostLinks]) -> None:
    for link in links:
        for connection in link._connections:
            assert connection.socket is not None
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def test_a_host_that_ends_sends_what_is_left(links: list[HostLinks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.supervision.links._CLOSE_S", 60.0)
    shrink_buffers(links)
    culprits = tuple(range(20000, 40000))  # longer than the buffers
    links[1].report("these have ended", culprits, is_crash=True)
    closing = threading.Thread(target=links[1].close)
    closing.start()
    deadline = time.monotonic() + 60
    while not links[0].endings() and time.monotonic() < deadline:
        links[0].poll(0.5)
        time.sleep(0.001)
    closing.join()
    assert links[0].reports == [HostFailure("these have ended", culprits, True, 0.5)]
    assert links[0].endings() == ["the run is over on beta (ranks 2-3)"]


def test_a_long_report_arrives(links: list[HostLinks]) -> None:
    """Longer than the buffers of the sockets, so it is sent in several parts."""
    shrink_buffers(links)
    culprits = tuple(range(20000, 40000))
    links[1].report("x" * 100000, culprits, is_crash=True)
    deadline = time.monotonic() + 60
    while not links[2].reports and time.monotonic() < deadline:
        for link in links:
            link.poll(0.5)
        time.sleep(0.001)
    for link in (links[0], links[2]):
        (report,) = link.reports
        assert report.culprits == culprits
        assert len(report.text) == 4096
        assert link.notices == []


@pytest.mark.parametrize("sender", [0, 1])
def test_a_report_reaches_every_other_host(links: list[HostLinks], sender: int) -> None:
    links[sender].report("on here: rank 2 has ended", [2], is_crash=True)
    for link in (*links, *links):
        link.poll(0.5)
    for index, link in enumerate(links):
        expected = [] if index == sender else [HostFailure("on here: rank 2 has ended", (2,), True, 0.5)]
        assert link.reports == expected


def test_other_connections_are_closed() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address, own = listener.getsockname(), job(0, listener)
    assert WatchJob.decode(WatchJob((), 5, (1.0, 2.0, 3.0), own).encode()).link == own
    hub, stranger = HostLinks(job(0, listener), 0.0), HostLinks(job(1, listener, "guessed"), 0.0)
    listener.detach()
    hub.poll(0.0)
    stranger.report("end", [0], is_crash=False)
    for _ in range(2):
        hub.poll(0.1)
    assert hub.reports == hub._connections == []
    known = HostLinks(LinkJob(HOSTS, 1, *address, "secret"), 0.0)
    last = HostLinks(LinkJob(HOSTS, 2, *address, "secret"), 0.0)
    for _ in range(3):
        hub.poll(0.2)
    assert [connection.host for connection in hub._connections] in ([1, 2], [2, 1])
    with pytest.raises(ConnectionRefusedError):  # nothing listens once all are there
        socket.create_connection(address, timeout=5)
    for link in (hub, known, last, stranger):
        link.close()


def test_silence_ends_ranks_on_which_nothing_changes() -> None:
    ranks = [waiting(0, 61), waiting(1, 62)]
    found = find_failure_elsewhere(ranks, [], [HOSTS[1]], LIMIT, 0.0)
    assert found is not None
    assert found.message == (
        "beta (ranks 2-3) sends no heartbeat: the host or its network is down; ranks 0-1 wait in reduce of 'blocks.7' "
        "(#1841) since 62 s; the limit is 60 s (supervise.limit_s)"
    )
    assert found.culprits == (2, 3)
    # the network of the watchers alone may be down, and a compilation or a save may take longer than this limit
    for at_work in (running(1, Phase.COMPILE, 61), running(1, Phase.SAVE, 61), waiting(1, 59)):
        assert find_failure_elsewhere([waiting(0, 61), at_work], [], [HOSTS[1]], LIMIT, 0.0) is None


def test_a_crash_elsewhere_leaves_the_ranks_time_to_notice() -> None:
    report = HostFailure("on beta: rank 2 (process 7) has ended", (2,), True, at=10.0)
    assert find_failure_elsewhere([waiting(0, 1)], [report], [], LIMIT, 10.0 + CRASH_S) is None
    found = find_failure_elsewhere([waiting(0, 1)], [report], [], LIMIT, 10.1 + CRASH_S)
    assert found is not None
    assert found.message.startswith("on beta: rank 2 (process 7) has ended; rank 0 waits in reduce")
    assert found.is_crash
    assert found.is_reported
    at_once = HostFailure("on beta: rank 2 is stopped", (2,), False, at=10.0)
    assert find_failure_elsewhere([running(0, Phase.DATA, 0)], [at_once], [], LIMIT, 10.0) is not None
    assert find_failure_elsewhere([], [at_once], [HOSTS[1]], LIMIT, 10.0) is None


def test_a_hang_here_names_the_silent_hosts_too() -> None:
    hang = Hang((0,), "rank 0 is in 'backward'")
    named = with_silent_hosts(hang, HOSTS[1:], [])
    assert named.culprits == (0, 2, 3, 4)
    assert named.message == (
        "rank 0 is in 'backward'; beta (ranks 2-3), gamma (rank 4) send no heartbeat: the host or its network is down"
    )
    assert with_silent_hosts(hang, [], []) == hang
    ended = with_silent_hosts(hang, [], ["the run is over on beta (ranks 2-3)"])
    assert ended == Hang((0,), "rank 0 is in 'backward'; the run is over on beta (ranks 2-3)")
