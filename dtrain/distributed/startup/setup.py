"""The number of ranks, the device of this one, and its process group."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from dtrain.distributed.communicator import Communicator
from dtrain.distributed.startup.launch_env import LaunchEnv
from dtrain.distributed.transport.choose import make_communicator
from dtrain.distributed.transport.descriptors import reserve_descriptors
from dtrain.distributed.transport.own_groups import close_at_exit, destroy
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.distributed.transport.sockets import interface_address
from dtrain.errors import ConfigError

LOOPBACK = "127.0.0.1"


def read_launch_env() -> LaunchEnv:
    """Returns rank and world size from the launcher's environment, or from the process group that exists."""
    return LaunchEnv.read(lambda: (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None)


def choose_device(name: str, local_rank: int) -> torch.device:
    """Returns the device of this rank: ``auto`` is its GPU if there is one, else the CPU.

    Raises:
        ConfigError: ``cuda`` was asked for and there is none, or there are more ranks on this host than GPUs.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("launch.device=cuda, but torch sees no CUDA device here; use launch.device=cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no GPU: this host has {count}; start at most {count} ranks here"
        )
    return torch.device("cuda", local_rank)


def processes_to_start(num_processes: int | str | None, device: str) -> int:
    """Returns the number of ranks that this command must start by itself; 1: this process is the rank.

    ``auto`` is the number of GPUs of this host, or 1 on CPU; under a launcher it is the launcher's number.

    Raises:
        ConfigError: a launcher has started another number of ranks on this host, or there are too few GPUs.
    """
    env = LaunchEnv.read()
    if env.launched:
        if num_processes not in (None, "auto", env.local_world_size):
            raise ConfigError(
                f"launch.num_processes={num_processes}, but a launcher has started {env.local_world_size} ranks "
                "on this host; remove one of the two"
            )
        return 1
    if num_processes is None:
        return 1
    if isinstance(num_processes, str):  # auto; more ranks on a CPU would only share its cores
        return max(1, torch.cuda.device_count()) if device != "cpu" else 1
    choose_device(device, num_processes - 1)
    return num_processes


def connect(
    device: torch.device, *, timeout_s: float = 600.0, job: int = 0, shared_memory: bool = True
) -> Communicator:
    """Returns a communicator over the existing process group, else over one made from the launcher's environment.

    One rank gets a communicator without a process group, which opens no socket. Ranks of one host listen on its
    loopback interface only. The store is prefixed by the restart count and ``job`` (the number of a sweep's job),
    because keys left by an earlier attempt would hang gloo's rendezvous.

    ``shared_memory`` lets CPU ranks of one host read each other's buffers, if the system allows it. A group made here
    is destroyed at exit, unless the program does so before: [Note: groups at exit].

    Raises:
        ConfigError: the environment names several ranks but no address to meet at, they need more connections than the
            system allows, or the existing group has no backend for ``device``.
    """
    env = read_launch_env()
    if dist.is_initialized():
        _check_backend(device)
        _make_current(device)
        if env.launched and env.one_host:  # for a group that is added to it
            _use_loopback()
        return make_communicator(dist.group.WORLD, device, shared_memory=shared_memory)
    _make_current(device)
    if env.world_size == 1:
        return SingleRank(device)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(
                f"there are {env.world_size} ranks but {name} is not set; launch.num_processes, torchrun, deepspeed "
                "and launch/slurm.sbatch set it"
            )
    timeout = timedelta(seconds=timeout_s)
    env.export()
    if env.one_host or _is_loopback(os.environ["MASTER_ADDR"]):
        _use_loopback()
    if device.type == "cpu":
        reserve_descriptors(env.world_size)
    store = PrefixStore(f"dtrain/{env.restart_count}/{job}", _meet(env, timeout))
    dist.init_process_group(_backend(device), store=store, rank=env.rank, world_size=env.world_size, timeout=timeout)
    close_at_exit(dist.group.WORLD)
    return make_communicator(dist.group.WORLD, device, shared_memory=shared_memory)


def connect_by_file(store: str, rank: int, world_size: int, device: torch.device, timeout_s: float = 600.0) -> None:
    """Makes the process group of ranks that meet at the file ``store``, without a port; a single rank needs none."""
    _make_current(device)
    if world_size == 1:
        return
    dist.init_process_group(
        _backend(device),
        store=dist.FileStore(store, world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    close_at_exit(dist.group.WORLD)


def ensure_process_group(device: torch.device) -> None:
    """Makes a process group of this single rank if there is none, for libraries that need one.

    gloo listens even for a single rank; here it does so on the loopback interface.
    """
    if dist.is_initialized():
        return
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(_backend(device), store=store, rank=0, world_size=1)
    finally:  # groups made later may need another interface
        if interface is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    close_at_exit(dist.group.WORLD)


def _make_current(device: torch.device) -> None:
    """Makes a GPU the current device of this thread, also without a process group.

    NCCL, Triton and events take the current device. Memory that is allocated on another one by mistake would also
    open a context of some hundred MB there.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


_stores: dict[tuple[str, str], Store] = {}  # by address and port; a port can be listened on only once


def _meet(env: LaunchEnv, timeout: timedelta) -> Store:
    """Returns the store in which the ranks find each other. Rank 0 hosts it, unless torch's agent does.

    It listens only on the address that ``MASTER_ADDR`` names, if that is one of this host. The jobs of a sweep share
    it, because an early rank would otherwise find the store of the job before.

    Raises:
        ConfigError: it cannot listen, or rank 0 does not answer.
    """
    host, port = _address_of_store(os.environ["MASTER_ADDR"]), os.environ["MASTER_PORT"]
    if (host, port) in _stores:
        return _stores[host, port]
    is_host = env.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        listener = _listen_at(host, int(port)) if is_host else None
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), env.world_size, is_host, timeout, master_listen_fd=listener
        )
    except (OSError, ValueError, dist.DistError) as error:
        what = "hold the store of the ranks" if is_host else "reach the store of rank 0"
        raise ConfigError(
            f"cannot {what} at MASTER_ADDR={host} MASTER_PORT={port}: {str(error).splitlines()[0]}; "
            "is the port taken, or a rank missing?"
        ) from error
    return _stores.setdefault((host, port), store)


def _address_of_store(host: str) -> str:
    """Returns ``host``, or an address of this machine if ``host`` is its name and /etc/hosts has 127.0.1.1 for it.

    The other hosts see another address behind that name: the one on the interface that the user has named for gloo.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not interface or _is_loopback(host):
        return host
    with suppress(OSError):  # TCPStore reports a name that is unknown
        if all(map(_has_loopback, socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))):
            return interface_address(interface)
    return host


def _has_loopback(found: tuple[Any, ...]) -> bool:
    """Whether an entry of ``getaddrinfo`` has a loopback address."""
    return ipaddress.ip_address(str(found[4][0]).partition("%")[0]).is_loopback


def _listen_at(host: str, port: int) -> int | None:
    """Returns a socket's descriptor that listens on ``host`` alone, where TCPStore itself would listen everywhere.

    None: ``host`` has no address of this machine, such as that of a gateway, or none that another host could reach, or
    several, of which another host may reach only one.
    """
    if _is_loopback(host):
        return socket.create_server((LOOPBACK, port)).detach()
    listeners: list[socket.socket] = []
    for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        family, *_, where = found
        if _has_loopback(found):  # in some systems' /etc/hosts
            continue
        try:
            listeners.append(socket.create_server(where, family=family))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    if len(listeners) == 1:
        return listeners[0].detach()
    for listener in listeners:
        listener.close()
    return None


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.")


def _use_loopback() -> None:
    """Makes gloo and NCCL listen on the loopback interface only, unless the user has named another."""
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _check_backend(device: torch.device) -> None:
    # such as cpu:gloo,cuda:nccl
    backends = dict(item.split(":") for item in dist.get_backend_config().split(","))
    backend = backends.get(device.type, "none")
    if backend == "none" or (device.type == "cuda" and backend == "gloo"):
        need = _backend(device)
        raise ConfigError(
            f"the process group has the backend {backend} for {device.type}, but this rank trains on {device}, which "
            f"needs {need}; call init_process_group with backend='{need}', or leave the group to dtrain.initialize"
        )


def disconnect(*, failed: bool = False) -> None:
    """Destroys the process groups, if there are any; ``failed``: as in ``destroy``."""
    if dist.is_initialized():
        destroy(failed=failed)
