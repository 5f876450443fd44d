"""The lease of a directory of checkpoints, in one process with a simulated clock: never two holders."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dtrain.checkpoint import Snapshot, save, storage
from dtrain.checkpoint.lease.lease import Lease, LeaseRequest, LeaseTiming, acquire, hold
from dtrain.checkpoint.lease.lease_file import Holder, path_of
from dtrain.errors import CheckpointError
from tests.helpers.checkpoints import ALONE, make_tensors, shards_of


class Clock:
    """Simulated seconds that pass only in ``sleep``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.while_sleeping: Callable[[], None] = lambda: None

    def timing(self) -> LeaseTiming:
        return LeaseTiming(clock=lambda: self.now, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.while_sleeping()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def claim(directory: Path, token: int = 1, **values: Any) -> Path:
    """Writes a lease file of a holder on another host, with ``values`` replaced."""
    elsewhere = replace(Holder.this_process(token), host="elsewhere", boot_id="another")
    path = path_of(directory, token)
    path.write_bytes(replace(elsewhere, **values).encode())
    return path


def holds(lease: Lease) -> bool:
    try:
        lease.check()
    except CheckpointError:
        return False
    return True


def leases(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("lease-"))


def test_lease_file_names_its_holder_and_is_removed_with_the_last_block(tmp_path: Path, monkeypatch: Any) -> None:
    write, overwrite = os.write, os.pwrite  # short ones are completed
    monkeypatch.setattr("os.write", lambda descriptor, data: write(descriptor, memoryview(data)[:7]))
    monkeypatch.setattr("os.pwrite", lambda descriptor, data, at: overwrite(descriptor, memoryview(data)[:7], at))
    with hold(tmp_path / "new" / "checkpoints") as lease:
        (path,) = (tmp_path / "new" / "checkpoints").iterdir()
        content = json.loads(path.read_text())
        with hold(tmp_path / "new" / ".." / "new" / "checkpoints") as same:
            assert same is lease
        lease.write_heartbeat()
        lease.check()
        assert json.loads(path.read_text()) == {**content, "counter": 1}
    assert content == {**asdict(Holder.this_process(1)), "id": content["id"]}
    assert (path.name, content["pid"], content["counter"]) == ("lease-00000001.json", os.getpid(), 0)
    assert not path.exists()


NO_PROC = {"boot_id": None, "pid_start": None, "pid_namespace": None}


@pytest.mark.parametrize("values", [{}, {"pid_namespace": "pid:[1]"}, NO_PROC])
def test_holder_on_an_unknown_system_is_waited_for(tmp_path: Path, clock: Clock, values: dict[str, Any]) -> None:
    claim(tmp_path, 7, **values)
    (tmp_path / "step-00000100.tmp-ab").mkdir()  # removed, so that the old holder cannot commit it
    lease = acquire(tmp_path, clock.timing())
    assert 90 <= clock.now <= 91
    lease.check()
    assert [path.name for path in tmp_path.iterdir()] == ["lease-00000008.json"]
    lease.release()
    assert leases(tmp_path) == []


def test_one_heartbeat_refuses_a_takeover(tmp_path: Path, clock: Clock) -> None:
    claim(tmp_path, 7)

    def live() -> None:
        if clock.now > 89:
            claim(tmp_path, 7, counter=1)

    clock.while_sleeping = live
    with pytest.raises(CheckpointError, match=r"in use by process \d+ on elsewhere \(lease 7, 1 heartbeats\); one"):
        acquire(tmp_path, clock.timing())
    assert clock.now < 90
    assert leases(tmp_path) == ["lease-00000007.json"]


def test_holder_that_has_ended_on_this_system_is_not_waited_for(tmp_path: Path, clock: Clock) -> None:
    """Also if another process has its number; the first is above the highest that Linux gives."""
    for pid in (2**22 + 1, os.getpid()):
        claim(tmp_path, 7, boot_id=Holder.this_process(1).boot_id, pid=pid, pid_start="1")
        acquire(tmp_path, clock.timing()).release()
        assert clock.now == 0


@pytest.mark.processes
def test_hidden_process_of_another_user_counts_as_alive(tmp_path: Path) -> None:
    """A system may hide another user's /proc entry, but signal 0 still finds the process."""
    system = replace(Holder.this_process(1), pid=1, pid_start="of a process that is hidden")
    read, write = os.pipe()
    if os.fork() == 0:
        with suppress(PermissionError):
            os.setuid(65534)
        os.write(write, b"gone" if system.has_ended() else b"there")
        os._exit(0)
    os.wait()
    assert os.read(read, 10) == b"there"


def test_a_lease_that_was_removed_is_lost_and_a_damaged_one_is_repaired(tmp_path: Path, clock: Clock) -> None:
    lease = acquire(tmp_path, clock.timing())
    lease.write_heartbeat()
    path_of(tmp_path, 1).unlink()
    lease.write_heartbeat()  # into a file without a name
    with pytest.raises(CheckpointError, match=r"the lease of .* is gone: .* removed lease-00000001.json; nothing"):
        lease.check()
    other = acquire(tmp_path, clock.timing())
    lease.write_heartbeat()
    with pytest.raises(CheckpointError, match=r"was taken over from this process, .* by process \d+ on .*lease 1"):
        lease.check()
    lease.release()  # leaves the other's file alone, which has the same name
    other.check()
    path_of(tmp_path, 1).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"by an unknown process: lease-00000001.json is damaged \(its fields"):
        other.check()
    other.write_heartbeat()
    other.check()
    other.release()


def test_lease_that_is_not_a_regular_file_is_waited_for_and_named(tmp_path: Path, clock: Clock, caplog: Any) -> None:
    path_of(tmp_path, 3).symlink_to(tmp_path / "target")
    (tmp_path / "target").write_text("mine")
    lease = acquire(tmp_path, clock.timing())
    assert clock.now >= 90
    assert "lease-00000003.json is damaged (not a regular file (lrwxrwxrwx))" in caplog.text
    assert leases(tmp_path) == ["lease-00000004.json"]
    assert (tmp_path / "target").read_text() == "mine"
    lease.release()


@pytest.mark.processes
def test_fork_does_not_hold_the_lease(tmp_path: Path) -> None:
    with hold(tmp_path) as lease:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            found = [str(holds(lease))]
            try:
                with hold(tmp_path, LeaseTiming(heartbeat_s=0.01, poll_s=0.01)):
                    found.append("held twice")
            except CheckpointError as error:
                found.append(str(error))
            lease.release()
            os.write(write, "\n".join(found).encode())
            os._exit(0)
        while not os.waitpid(child, os.WNOHANG)[0]:  # it ends when it has seen a heartbeat after its first look
            lease.write_heartbeat()
            time.sleep(0.001)
        text = os.read(read, 10_000).decode().splitlines()
        assert text[0] == "False"
        assert f"{tmp_path} is in use by process {os.getpid()} on " in text[1]
        lease.check()


def test_saves_of_one_process_are_serialized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the second of two engines would remove what the first is writing."""
    first_writes, never = threading.Event(), threading.Event()
    real = storage.sync

    def sync(descriptor: int) -> None:
        if threading.current_thread().name == "first" and not first_writes.is_set():
            first_writes.set()
            never.wait(0.2)  # the second gets no further
        real(descriptor)

    def work(step: int) -> None:
        save(tmp_path, Snapshot(step, shards_of(make_tensors(step), 0, 1), {}), ALONE)

    first, second = (threading.Thread(target=work, args=(step,), name=name) for step, name in ((1, "first"), (2, "2")))
    with hold(tmp_path), monkeypatch.context() as patch:
        patch.setattr(storage, "sync", sync)
        first.start()
        assert first_writes.wait(60)
        second.start()
        first.join()
        second.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


# -- any order of events -----------------------------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Three jobs that start, stop, resume and leave in any order and at any speed."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.directory = Path(self.folder.name)
        self.clock = Clock()
        self.requests: dict[int, LeaseRequest] = {}
        self.leases: dict[int, Lease] = {}
        self.stopped: set[int] = set()
        self.lost: list[Lease] = []
        self.silent_since: dict[int, float] = {}

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            for lease in [*self.leases.values(), *self.lost]:
                lease.release()
            self.folder.cleanup()

    @rule(job=st.integers(0, 2))
    def look_or_take(self, job: int) -> None:
        if job in self.leases:
            return
        request = self.requests.setdefault(job, LeaseRequest(self.directory, self.clock.timing()))
        before = [other for other, lease in self.leases.items() if holds(lease)]
        try:
            lease = request.attempt()
        except CheckpointError:
            assert before, "refused where nobody holds it"
            del self.requests[job]
            return
        if lease is not None:
            for other in before:
                assert other in self.stopped
                assert self.clock.now - self.silent_since[other] >= 90, "taken from a holder with heartbeats"
            self.leases[job] = lease
            del self.requests[job]

    @rule(job=st.integers(0, 2))
    def stop(self, job: int) -> None:
        if job in self.leases and job not in self.stopped:
            self.stopped.add(job)
            self.silent_since[job] = self.clock.now

    @rule(job=st.integers(0, 2))
    def resume(self, job: int) -> None:
        if job in self.stopped:
            self.stopped.discard(job)
            self.leases[job].write_heartbeat()

    @rule(job=st.integers(0, 2))
    def leave(self, job: int) -> None:
        if job in self.leases and job not in self.stopped:
            self.leases.pop(job).release()

    @rule(seconds=st.sampled_from([0.25, 5.0, 45.0, 90.0, 1000.0]))
    def time_passes(self, seconds: float) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now = min(until, self.clock.now + 5)
            for job, lease in self.leases.items():
                if job not in self.stopped:
                    lease.write_heartbeat()

    @invariant()
    def at_most_one_holds_it(self) -> None:
        if not hasattr(self, "folder"):
            return
        holding = [job for job, lease in self.leases.items() if holds(lease)]
        assert len(holding) <= 1
        assert not any(holds(lease) for lease in self.lost), "a lost lease stays lost"
        for job in list(self.leases):
            if job not in holding:
                self.lost.append(self.leases.pop(job))
                self.stopped.discard(job)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=25, stateful_step_count=30, suppress_health_check=list(HealthCheck))


def calls_of(work: Callable[[], Any], act: Callable[[int], None]) -> int:
    """Runs ``work`` with ``act(i)`` before its i-th file system change; returns the number of changes."""
    count = 0
    with pytest.MonkeyPatch.context() as patch:

        def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                nonlocal count
                count += 1
                act(count - 1)
                return real(*args)

            return call

        for name in ("create", "write", "sync", "link", "remove_file", "rename"):
            patch.setattr(storage, name, wrap(getattr(storage, name)))
        work()
    return count


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
def test_another_process_takes_the_lease_at_any_instant(tmp_path: Path, stale: bool, leaves: bool) -> None:
    """Exactly one process holds the lease in the end, whenever another one takes it (and perhaps releases it)."""
    instants: Iterator[int] = iter(range(100))
    for instant in instants:
        directory = tmp_path / str(instant)
        (directory / "step-00000001.tmp-ab").mkdir(parents=True)
        clock = Clock()
        ours, theirs = (LeaseRequest(directory, clock.timing()) for _ in range(2))
        if stale:
            claim(directory, 4)
            assert ours.attempt() is theirs.attempt() is None
            clock.now = 90
        got: list[Lease | None] = []

        def come(index: int, instant: int = instant, other: LeaseRequest = theirs, got: Any = got) -> None:
            if index == instant:
                with suppress(CheckpointError):
                    got.append(other.attempt())
                if got and got[0] is not None and leaves:
                    got[0].release()

        mine: list[Lease | None] = []
        total = calls_of(lambda ours=ours, mine=mine: mine.append(ours.attempt()), come)  # type: ignore[misc]
        if total <= instant:
            break
        holding = [lease for lease in [*mine, *got] if lease is not None and holds(lease)]
        assert len(holding) == 1 or (leaves and got[0] is not None and not holding), (instant, mine, got)
        assert all(lease is None or lease in holding for lease in mine), "it wrongly believes that it holds the lease"
        assert len(leases(directory)) == len(holding)
    assert total >= 6


def test_a_file_system_without_hard_links_is_refused(tmp_path: Path, clock: Clock, monkeypatch: Any) -> None:
    def link(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(source))

    monkeypatch.setattr(storage, "link", link)
    with pytest.raises(CheckpointError, match="is on a file system without hard links; use another"):
        acquire(tmp_path, clock.timing())
    assert list(tmp_path.iterdir()) == []
