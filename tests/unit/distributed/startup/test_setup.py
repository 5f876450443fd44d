"""How a rank starts: its launcher's environment, its device, the store, open files, and the end of its group."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dtrain.distributed.startup import launch_env, setup
from dtrain.distributed.startup.launch_env import LaunchEnv
from dtrain.distributed.startup.setup import connect, connect_by_file, disconnect, processes_to_start
from dtrain.distributed.transport import own_groups
from dtrain.distributed.transport.descriptors import reserve_descriptors
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.errors import ConfigError
from tests.helpers.launch import LAUNCHER

GPU = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER, launch_env.LAUNCHER_PID, "TORCHELASTIC_RUN_ID", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def set_environment(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    for word in words.split():
        monkeypatch.setenv(*word.split("="))


SRUN = "SLURM_STEP_NUM_TASKS=7 SLURM_STEP_TASKS_PER_NODE=2(x3),1 SLURM_PROCID=6"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", LaunchEnv()),
        (
            "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 TORCHELASTIC_RESTART_COUNT=5",
            LaunchEnv(3, 4, 1, 2, 5, launched=True, one_host=False),
        ),
        ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_SIZE=2", LaunchEnv(1, 2, 1, 2, launched=True)),  # deepspeed
        ("RANK=1 WORLD_SIZE=2", LaunchEnv(1, 2, 1, 2, launched=True, one_host=False)),
        ("SLURM_NTASKS=7 SLURM_PROCID=0", LaunchEnv()),  # a batch script
        (f"{SRUN} SLURM_LOCALID=0 SLURM_NODEID=3", LaunchEnv(6, 7, 0, 1, launched=True, one_host=False)),
        (f"{SRUN} SLURM_LOCALID=1 SLURM_NODEID=1", LaunchEnv(6, 7, 1, 2, launched=True, one_host=False)),
        (
            "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NODEID=0",
            LaunchEnv(1, 2, 1, 2, launched=True),
        ),
        # torchrun, one task a node
        (f"{SRUN} SLURM_LOCALID=0 RANK=1 WORLD_SIZE=14", LaunchEnv(1, 14, 1, 14, launched=True, one_host=False)),
    ],
)
def test_ranks_of_launchers(words: str, expected: LaunchEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, words)
    assert LaunchEnv.read() == expected
    before = dict(os.environ)
    monkeypatch.setattr(os, "environ", {**before, "LOCAL_RANK": "9"})
    expected.export()
    exported = {"RANK": expected.rank, "WORLD_SIZE": expected.world_size, "LOCAL_WORLD_SIZE": expected.local_world_size}
    for name, value in exported.items():
        assert os.environ[name] == before.get(name, str(value))
    assert os.environ["LOCAL_RANK"] == "9", "what is set stays"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("WORLD_SIZE=2", "sets WORLD_SIZE but not RANK"),
        ("RANK=0", "sets RANK but not WORLD_SIZE"),
        ("RANK=2 WORLD_SIZE=2", "RANK=2 is not below WORLD_SIZE=2"),
        ("RANK=one WORLD_SIZE=2", "not a whole number: .*'one'"),
        (f"{SRUN} SLURM_NODEID=1", "SLURM_LOCALID"),
        (f"{SRUN} SLURM_LOCALID=0 SLURM_NODEID=4", "not what srun sets with it"),
    ],
)
def test_an_inconsistent_environment_is_refused(words: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, words)
    with pytest.raises(ConfigError, match=message):
        LaunchEnv.read()


@pytest.mark.parametrize(
    ("words", "group", "expected"),
    [
        ("WORLD_SIZE=1", (0, 1), (0, 1)),  # as accelerate's debug_launcher sets it
        ("WORLD_SIZE=2", (1, 2), (1, 2)),
        ("RANK=1", (1, 4), (1, 4)),
        ("", (1, 4), (0, 1)),
        ("WORLD_SIZE=2", (0, 1), None),
        ("RANK=1", (0, 2), None),
    ],
)
def test_a_process_group_stands_for_a_missing_variable_if_it_agrees(
    words: str, group: tuple[int, int], expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, words)
    if expected is None:
        with pytest.raises(ConfigError, match="a launcher sets both"):
            LaunchEnv.read(lambda: group)
    else:
        env = LaunchEnv.read(lambda: group)
        assert (env.rank, env.world_size) == expected


TWO_RANKS = "RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2"


@pytest.mark.parametrize(
    ("words", "asked", "device", "num_gpus", "expected"),
    [
        ("", None, "auto", 8, 1),
        ("", 3, "cpu", 0, 3),
        ("", 8, "cuda", 8, 8),
        ("", 9, "cuda", 8, "local rank 8 has no GPU: this host has 8"),
        ("", 2, "cuda", 0, "torch sees no CUDA device"),
        ("", "auto", "auto", 8, 8),
        ("", "auto", "auto", 0, 1),
        ("", "auto", "cpu", 8, 1),
        (TWO_RANKS, None, "cpu", 0, 1),
        (TWO_RANKS, "auto", "cuda", 8, 1),
        (TWO_RANKS, 2, "cpu", 0, 1),
        (TWO_RANKS, 4, "cpu", 0, "launch.num_processes=4, but a launcher has started 2 ranks on this host"),
    ],
)
def test_number_of_ranks_that_a_command_starts(
    words: str, asked: Any, device: str, num_gpus: int, expected: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, words)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    if isinstance(expected, int):
        assert processes_to_start(asked, device) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            processes_to_start(asked, device)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
@pytest.mark.parametrize(
    ("variable", "parent", "first", "num_calls", "ends"),
    [
        ("", 1, "/sbin/init", 0, False),  # without a launcher
        *(
            (variable, *case)
            for variable in ("TORCHELASTIC_RUN_ID", "LOCAL_SIZE")
            for case in (
                (4711, "/sbin/init", 1, False),
                (1, "/sbin/init", 1, True),
                (1, PermissionError("of another user"), 1, True),
                (1, "/usr/bin/python3.12", 1, False),  # torchrun may be the first process of a container
            )
        ),
        (launch_env.LAUNCHER_PID, 1, "/sbin/init", 1, False),  # dtrain's own, of process 1
        (launch_env.LAUNCHER_PID, 4711, "/sbin/init", 1, True),
    ],
)
def test_a_rank_ends_with_its_launcher(
    variable: str, parent: int, first: str | OSError, num_calls: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if that has ended before it could ask the kernel for a signal."""
    calls: list[tuple[int, ...]] = []
    prctl = SimpleNamespace(prctl=lambda *call: calls.append(call))  # the process of the tests must not make it
    monkeypatch.setattr(launch_env.ctypes, "CDLL", lambda _: prctl)
    monkeypatch.setattr(os, "getppid", lambda: parent)
    monkeypatch.setattr(os, "readlink", mock.Mock(side_effect=[first]))
    if variable:
        monkeypatch.setenv(variable, "1")
    with pytest.raises(SystemExit) if ends else nullcontext():
        launch_env.follow_launcher()
    assert calls == [(1, 15)] * num_calls, "PR_SET_PDEATHSIG, SIGTERM"
    assert launch_env.LAUNCHER_PID not in os.environ


def test_a_rank_makes_its_gpu_the_current_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert connect(GPU).device == GPU
    connect_by_file(str(tmp_path / "store"), 0, 1, GPU)
    assert current == [GPU, GPU]
    connect(torch.device("cpu"))
    assert current == [GPU, GPU], "a CPU was made the current GPU"
    # in the caller's group
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo")
    with pytest.raises(ConfigError, match="needs nccl"):
        connect(GPU)
    assert current == [GPU, GPU], "the device was changed before the call was refused"
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(setup, "make_communicator", lambda group, device, **_: SingleRank(device))
    assert connect(GPU).device == GPU
    assert current == [GPU] * 3


def listening_at(host: str, port: int = 0) -> str | None:
    descriptor = setup._listen_at(host, port)
    if descriptor is None:
        return None
    with socket.socket(fileno=descriptor) as listener:
        return str(listener.getsockname()[0])


def test_a_name_that_is_loopback_here_means_the_named_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts: the store would listen on all interfaces."""
    found = {"node1": ["127.0.1.1", "::1"], "node2": ["127.0.1.1", "192.0.2.1"]}

    def resolve(host: str, *_: object, **__: object) -> list[object]:
        if host not in found:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in found[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(setup, "interface_address", {"eth7": "192.0.2.7"}.__getitem__)
    assert setup._address_of_store("node1") == "node1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert setup._address_of_store("node1") == "192.0.2.7"
    for host in ("node2", "unknown", "localhost"):
        assert setup._address_of_store(host) == host


def test_the_store_listens_where_master_addr_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere it would listen on all interfaces; an address of another machine leaves it no choice."""
    found: list[str] = []

    def resolve(host: str, port: int, **_: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    assert listening_at("localhost") == listening_at("127.0.0.3") == "127.0.0.1"
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolve)
        found[:] = ["192.0.2.1"]  # of documentation: no host has it
        assert listening_at("node1") is None
        found[:] = ["127.0.1.1"]  # Debian's own entry for its host name
        assert listening_at("node1") is None
        patch.setattr("ipaddress.IPv4Address.is_loopback", False)
        found[:] = ["192.0.2.1", "127.0.0.2"]
        assert listening_at("node1") == "127.0.0.2"
        found[:] = ["127.0.0.2", "127.0.0.3"]  # another host may reach only one of them
        assert listening_at("node1") is None
        found[:] = ["127.0.0.2"]
        with socket.create_server(("127.0.0.2", 0)) as taken, pytest.raises(OSError, match="in use"):
            listening_at("node1", taken.getsockname()[1])


@pytest.mark.parametrize(
    ("backends", "failed", "end"),
    [
        ("cuda:nccl", True, "aborted"),
        ("cpu:gloo,cuda:nccl", True, "aborted"),
        ("cuda:nccl", False, "destroyed"),
        ("cpu:gloo,cuda:gloo", True, "destroyed"),
    ],
)
def test_a_failed_rank_waits_for_no_collective_of_nccl(backends: str, failed: bool, end: str, monkeypatch: Any) -> None:
    """``destroy_process_group`` waits for the kernels in flight, which other ranks may never join."""
    ends = []

    def abort(group: Any) -> None:
        ends.append("aborted")
        raise RuntimeError("a second error must not hide the first")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: ends.append("destroyed"))
    monkeypatch.setattr(own_groups, "_abort_process_group", abort)
    disconnect(failed=failed)
    assert ends == [end]


@pytest.fixture
def hard_limit() -> Iterator[int]:
    """Sets the soft limit on open files to 1,024."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 8192:
        pytest.skip(f"the hard limit here is {before[1]}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_on_open_files_is_raised_for_many_ranks(hard_limit: int) -> None:
    reserve_descriptors(64)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, hard_limit), "it suffices"
    reserve_descriptors(1024)
    soft, kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft >= 2 * 1024 + 256
    assert kept == hard_limit
    with (
        mock.patch.object(resource, "getrlimit", return_value=(1024, 4096)),
        pytest.raises(ConfigError, match=r"connections to 4096 ranks need \d+ open files .* allows 4096; .* ulimit -n"),
    ):
        reserve_descriptors(4096)
