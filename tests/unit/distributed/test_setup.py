"""The device of a rank, and the end of its process group."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtrain.distributed import setup
from dtrain.distributed.setup import connect, connect_by_file, disconnect
from dtrain.distributed.single_rank import SingleRank
from dtrain.errors import ConfigError

GPU = torch.device("cuda", 1)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that were made the current one."""
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return devices


def test_a_single_rank_makes_its_gpu_the_current_device(current: list[torch.device], tmp_path: Path) -> None:
    assert connect(GPU).device == GPU
    connect_by_file(str(tmp_path / "store"), 0, 1, GPU)
    assert current == [GPU, GPU]
    connect(torch.device("cpu"))
    assert current == [GPU, GPU], "a CPU was made the current GPU"


def test_a_rank_of_the_callers_group_makes_its_gpu_the_current_device(
    current: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo")
    with pytest.raises(ConfigError, match="needs nccl"):
        connect(GPU)
    assert not current, "the device was changed before the call was refused"
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(setup, "make_communicator", lambda group, device, **_: SingleRank(device))
    assert connect(GPU).device == GPU
    assert current == [GPU]


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
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
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
def test_a_failed_rank_waits_for_no_collective_of_nccl(
    backends: str, failed: bool, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``destroy_process_group`` waits for the kernels in flight, which other ranks may never join."""
    ends = []

    def abort() -> None:
        ends.append("aborted")
        raise RuntimeError("a second error must not hide the first")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ends.append("destroyed"))
    monkeypatch.setattr(setup, "_abort_process_group", abort)
    monkeypatch.setattr(setup, "_failed", False)  # restored, so that the tests end without a wait
    disconnect(failed=failed)
    assert ends == [end]
