"""How many ranks there are, the device of this one, and the process group it talks over."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from dtrain.distributed.communicator import Communicator
from dtrain.distributed.launch_env import LaunchEnv
from dtrain.errors import ConfigError

LOOPBACK = "127.0.0.1"


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of this rank: ``auto`` is its GPU where there is one, else the CPU.

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
    """How many ranks this command has to start by itself; 1: this process is the rank.

    ``auto`` is as many as the GPUs of this host, or 1 on CPU; it leaves the choice to a launcher where there is one.

    Raises:
        ConfigError: a launcher has started another number of ranks on this host, or there are not so many GPUs.
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
    if isinstance(num_processes, str):  # auto
        return max(1, torch.cuda.device_count()) if device != "cpu" else 1
    choose_device(device, num_processes - 1)
    return num_processes


def connect(
    device: torch.device, *, timeout_s: float = 600.0, job: int = 0, shared_memory: bool = True
) -> Communicator:
    """The communicator over the existing process group, else over one made from the launcher's environment.

    One rank gets a communicator without a process group, which opens no socket. Ranks of one host listen on its
    loopback interface alone. The store is prefixed by the restart count and ``job`` (the number of a sweep's job): keys
    left by an earlier attempt would hang gloo's rendezvous.

    ``shared_memory`` lets CPU ranks of one host read each other's buffers, where they can. A group made here is ended
    with the interpreter, unless :func:`disconnect` did it before or an exception ends all.

    Raises:
        ConfigError: the environment names several ranks but not where to meet, or the group that exists has no backend
            for ``device``.
    """
    if dist.is_initialized():
        _check_backend(device)
        env = LaunchEnv.read()
        if env.launched and env.one_host:  # for a group that is added to it
            _stay_on_loopback()
        return Communicator(dist.group.WORLD, device, shared_memory=shared_memory)
    env = LaunchEnv.read()
    if env.world_size == 1:
        return Communicator(None, device)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(
                f"there are {env.world_size} ranks but {name} is not set; launch.num_processes, torchrun, deepspeed "
                "and launch/slurm.sbatch set it"
            )
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    env.export()
    if env.one_host or _is_loopback(os.environ["MASTER_ADDR"]):
        _stay_on_loopback()
    store = PrefixStore(f"dtrain/{env.restart_count}/{job}", _meet(env, timeout))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout)
    comm = Communicator(dist.group.WORLD, device, shared_memory=shared_memory)
    atexit.register(_leave, comm)
    return comm


_stores: dict[tuple[str, str], Store] = {}


def _meet(env: LaunchEnv, timeout: timedelta) -> Store:
    """The store in which the ranks find each other. Rank 0 holds it, unless an agent of torch does.

    It listens on the loopback interface alone where that is what ``MASTER_ADDR`` names. The jobs of a sweep share it: a
    rank that is early must not find the store of the job before.

    Raises:
        ConfigError: it cannot listen, or rank 0 does not answer.
    """
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if (host, port) in _stores:
        return _stores[host, port]
    holds = env.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        listener = None
        if holds and _is_loopback(host):
            listener = socket.create_server((LOOPBACK, int(port))).detach()
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), env.world_size, holds, timeout, master_listen_fd=listener
        )
    except (OSError, ValueError, dist.DistError) as error:
        what = "hold the store of the ranks" if holds else "reach the store of rank 0"
        raise ConfigError(
            f"cannot {what} at MASTER_ADDR={host} MASTER_PORT={port}: {str(error).splitlines()[0]}; "
            "is the port taken, or a rank missing?"
        ) from error
    return _stores.setdefault((host, port), store)


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.")


def _stay_on_loopback() -> None:
    """Lets the ranks of one host listen on the loopback interface alone, unless the user has named another."""
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _check_backend(device: torch.device) -> None:
    backends = dict(item.split(":") for item in dist.get_backend_config().split(","))
    backend = backends.get(device.type, "none")
    if backend == "none" or (device.type == "cuda" and backend == "gloo"):
        need = "nccl" if device.type == "cuda" else "gloo"
        raise ConfigError(
            f"the process group has the backend {backend} for {device.type}, but this rank trains on {device}, which "
            f"needs {need}; call init_process_group with backend='{need}', or leave the group to dtrain.initialize"
        )


def _leave(comm: Communicator) -> None:
    """At the end of the interpreter: a thread of gloo that still holds a tensor then would abort it.

    After an uncaught exception the other ranks may never answer, and waiting for them would hide it.
    """
    if not hasattr(sys, "last_value"):
        comm.release()
        if dist.is_initialized():
            dist.destroy_process_group()


def disconnect() -> None:
    """Ends the process group, if there is one."""
    atexit.unregister(_leave)
    if dist.is_initialized():
        dist.destroy_process_group()
