"""Where this rank stands, its device, and the process group it talks over."""

from __future__ import annotations

import atexit
import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from dtrain.distributed.collectives import Communicator
from dtrain.errors import ConfigError


@dataclass(frozen=True)
class LaunchEnv:
    """What the launcher says in the environment; one rank where it says nothing."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart_count: int = 0

    @staticmethod
    def read() -> LaunchEnv:
        """Reads ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` and ``TORCHELASTIC_RESTART_COUNT``.

        Raises:
            ConfigError: ``WORLD_SIZE`` without ``RANK`` or the other way round, not a number, or a rank out of range.
        """
        env = os.environ
        if ("RANK" in env) != ("WORLD_SIZE" in env):
            missing, there = ("RANK", "WORLD_SIZE") if "WORLD_SIZE" in env else ("WORLD_SIZE", "RANK")
            raise ConfigError(f"the environment sets {there} but not {missing}; a launcher sets both, or unset {there}")
        if "RANK" not in env:
            return LaunchEnv()
        try:
            rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
            local_rank = int(env.get("LOCAL_RANK", rank))
            local_world_size = int(env.get("LOCAL_WORLD_SIZE", world_size))
            restart_count = int(env.get("TORCHELASTIC_RESTART_COUNT", 0))
        except ValueError as error:
            raise ConfigError(f"a launcher variable (RANK, WORLD_SIZE, ...) is not a whole number: {error}") from None
        if not 0 <= rank < world_size:
            raise ConfigError(f"RANK={rank} is not below WORLD_SIZE={world_size}; start every rank with its own RANK")
        return LaunchEnv(rank, world_size, local_rank, local_world_size, restart_count)


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


def connect(
    device: torch.device, *, timeout_s: float = 600.0, job: int = 0, shared_memory: bool = True
) -> Communicator:
    """The communicator over the existing process group, else over one made from the launcher's environment.

    One rank gets a communicator without a process group, which opens no socket. The store is prefixed by the restart
    count and ``job`` (the number of a sweep's job): keys left by an earlier attempt would hang gloo's rendezvous.

    ``shared_memory`` lets CPU ranks of one host read each other's buffers, where they can. A group made here is ended
    with the interpreter, unless :func:`disconnect` did it before or an exception ends all.

    Raises:
        ConfigError: the environment names several ranks but not where to meet, or the group that exists has no backend
            for ``device``.
    """
    if dist.is_initialized():
        _check_backend(device)
        return Communicator(dist.group.WORLD, device, shared_memory=shared_memory)
    env = LaunchEnv.read()
    if env.world_size == 1:
        return Communicator(None, device)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(f"WORLD_SIZE={env.world_size} but {name} is not set; start the ranks with torchrun")
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store = PrefixStore(f"dtrain/{env.restart_count}/{job}", store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    comm = Communicator(dist.group.WORLD, device, shared_memory=shared_memory)
    atexit.register(_leave, comm)
    return comm


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
