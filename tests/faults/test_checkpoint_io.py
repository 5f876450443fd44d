"""File system errors in the lease and at the start of a run (F10); ``test_checkpoint_crash`` has those of a save."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import verify
from dtrain.checkpoint.lease.lease import LeaseRequest, LeaseTiming, hold
from dtrain.checkpoint.lease.lease_file import read_lease
from dtrain.config.schema import RunConfig
from dtrain.errors import ConfigError
from dtrain.train.run_dir import open_run_dir
from tests.faults.test_checkpoint_crash import Call, Seam
from tests.helpers.checkpoints import ALONE, save_good, save_threads
from tests.helpers.fault_counts import FaultCounts

READ_ONLY = os.strerror(errno.EROFS)


@pytest.mark.parametrize("function", ["overwrite", "sync"])
def test_failing_heartbeats_are_logged_and_the_lease_stays(
    tmp_path: Path, faults: FaultCounts, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    """The lease stays held until another process takes it: saves work, and heartbeats resume when they can."""
    failures = threading.Semaphore(0)

    def act(call: Call) -> None:
        if call[0] == function and threading.current_thread().name == "lease":
            failures.release()
            raise OSError(errno.EROFS, READ_ONLY)

    with hold(tmp_path, LeaseTiming(heartbeat_s=0.005)) as lease:
        with pytest.MonkeyPatch.context() as patch:
            Seam(patch, act)
            for _ in range(3):
                assert failures.acquire(timeout=60)
            save_good(tmp_path, 100)
            lease.check()
        before = read_lease(tmp_path)
        deadline = time.monotonic() + 60
        while read_lease(tmp_path) == before:
            assert time.monotonic() < deadline, "heartbeats did not resume"
        save_good(tmp_path, 200)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in warnings] == [
        f"checkpoint: the heartbeat of the lease of {tmp_path} failed: {READ_ONLY} (errno {errno.EROFS})"
    ]
    assert verify(tmp_path).ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000100", "step-00000200"]
    faults.passed("F10", 1)


def test_heartbeats_end_when_the_lease_is_lost(tmp_path: Path, faults: FaultCounts, caplog: Any) -> None:
    """After a takeover the loss is logged at once, and every save fails."""
    with hold(tmp_path, LeaseTiming(heartbeat_s=0.2)):
        with ExitStack() as undo:
            other = LeaseRequest(tmp_path, LeaseTiming(limit_s=0)).attempt()
            assert other is not None
            undo.callback(other.release)
            deadline = time.monotonic() + 60
            while "was taken over from this process" not in caplog.text:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            results = save_threads(tmp_path, 100)
            assert all("was taken over from this process" in str(error) for error in results), results
        for error in save_threads(tmp_path, 100):  # a lost lease stays lost
            assert "is gone: another job took it over and has ended" in str(error)
    save_good(tmp_path, 100)
    faults.passed("F10", 1)


def test_lease_that_cannot_be_removed(tmp_path: Path, faults: FaultCounts, caplog: pytest.LogCaptureFixture) -> None:
    """The save succeeds, and the next save of this process does not wait for the lease file left behind."""

    def act(call: Call) -> None:
        if call[0] == "remove_file" and call[1][0].suffix == ".json":
            raise OSError(errno.EROFS, READ_ONLY)

    with pytest.MonkeyPatch.context() as patch:
        Seam(patch, act)
        save_good(tmp_path, 100)
    assert f"{tmp_path}/lease-00000001.json could not be removed: {READ_ONLY} (errno {errno.EROFS})" in caplog.text
    started = time.monotonic()
    save_good(tmp_path, 200)
    assert time.monotonic() - started < LeaseTiming().limit_s
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000100", "step-00000200"]
    faults.passed("F10", 1)


@pytest.mark.parametrize(
    ("function", "what"), [("create", "lease-"), ("link", "lease-"), ("make_directory", "checkpoints")]
)
def test_run_that_cannot_have_the_lease_does_not_start(
    tmp_path: Path, faults: FaultCounts, function: str, what: str
) -> None:
    config = RunConfig(run_dir=str(tmp_path / "run"))

    def act(call: Call) -> None:
        if seam.is_at(call, function, what):
            raise OSError(errno.EROFS, READ_ONLY)

    with ExitStack() as held:
        with pytest.MonkeyPatch.context() as patch:
            seam = Seam(patch, act)
            with pytest.raises(ConfigError, match=r"^Read-only file system \(errno 30\)$"):
                open_run_dir(config, ALONE, None, held)
        assert open_run_dir(config, ALONE, None, held).load_from is None
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    faults.passed("F10", 1)
