"""A rank ends with its launcher, also if that has ended before the rank could ask the kernel for a signal."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain.distributed import launch_env

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The calls of prctl, which the process of the tests must not make; the launcher's variables are unset."""
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(launch_env.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *call: calls.append(call)))
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_SIZE", launch_env.LAUNCHER_PID):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_a_process_without_a_launcher_follows_nothing(signals: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 1)
    launch_env.follow_launcher()
    assert not signals


@pytest.mark.parametrize(
    ("parent", "first", "ends"),
    [
        (4711, "/sbin/init", False),
        (1, "/sbin/init", True),
        (1, PermissionError("of another user"), True),
        (1, "/usr/bin/python3.12", False),  # torchrun may be the first process of a container
    ],
)
@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "LOCAL_SIZE"])
def test_a_rank_of_another_launcher(
    variable: str, parent: int, first: str | OSError, ends: bool, signals: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def readlink(path: str) -> str:
        assert path == "/proc/1/exe"
        if isinstance(first, OSError):
            raise first
        return first

    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(os, "getppid", lambda: parent)
    monkeypatch.setattr(os, "readlink", readlink)
    _follow(signals, ends)


@pytest.mark.parametrize("ends", [False, True])
def test_a_rank_of_the_own_launcher(ends: bool, signals: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch_env.LAUNCHER_PID, str(os.getppid() + ends))
    _follow(signals, ends)
    assert launch_env.LAUNCHER_PID not in os.environ


def _follow(signals: list[Any], ends: bool) -> None:
    if ends:
        with pytest.raises(SystemExit):
            launch_env.follow_launcher()
    else:
        launch_env.follow_launcher()
    assert len(signals) == 1
