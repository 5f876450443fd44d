"""Rank and world size of this process, from its launcher's environment variables. Imports no torch."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dtrain.errors import ConfigError

LAUNCHER_PID = "DTRAIN_LAUNCHER_PID"
"""Environment variable with the process id of dtrain's own launcher, for the ranks that it starts."""

_PR_SET_PDEATHSIG = 1  # prctl(2)


def follow_launcher() -> None:
    """Makes the kernel send this rank SIGTERM when its launcher ends, so that no rank outlives it.

    The launcher is dtrain's own, torchrun or DeepSpeed's: each of them waits for its ranks as long as it lives.
    """
    launcher = os.environ.pop(LAUNCHER_PID, None)  # not for processes that this rank starts
    waits = launcher is not None or "TORCHELASTIC_RUN_ID" in os.environ or "LOCAL_SIZE" in os.environ
    if not waits or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher) if launcher is not None else _is_orphan():  # it has ended already
        sys.exit(1)


def _is_orphan() -> bool:
    """Whether the first process of the machine has taken this one over; in a container it may be the launcher."""
    if os.getppid() != 1:
        return False
    try:
        return not os.path.basename(os.readlink("/proc/1/exe")).startswith("python")
    except OSError:  # it is another user's
        return True


@dataclass(frozen=True)
class LaunchEnv:
    """Rank and world size from the launcher; a single rank without one.

    Attributes:
        launched: whether a launcher has started this process as one of its ranks.
        one_host: whether all ranks are known to be on this host.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart_count: int = 0
    launched: bool = False
    one_host: bool = True

    @staticmethod
    def read(group: Callable[[], tuple[int, int] | None] = lambda: None) -> LaunchEnv:
        """Reads the variables of torchrun and the deepspeed launcher, else those of SLURM's ``srun``.

        The former are ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` (deepspeed: ``LOCAL_SIZE``) and
        ``TORCHELASTIC_RESTART_COUNT``.

        Args:
            group: returns rank and size of the process group that exists, or None. It stands for one of ``RANK`` and
                ``WORLD_SIZE`` that is missing, if the other agrees: accelerate's ``debug_launcher`` sets only one.

        Raises:
            ConfigError: ``WORLD_SIZE`` without ``RANK`` or the other way round, not a number, or a rank out of range.
        """
        env: Mapping[str, str] = os.environ
        if ("RANK" in env) != ("WORLD_SIZE" in env) and (existing := group()) is not None:
            of_group = {"RANK": str(existing[0]), "WORLD_SIZE": str(existing[1])}
            if all(env.get(name, value) == value for name, value in of_group.items()):
                env = {**of_group, **env}
        if ("RANK" in env) != ("WORLD_SIZE" in env):
            missing, there = ("RANK", "WORLD_SIZE") if "WORLD_SIZE" in env else ("WORLD_SIZE", "RANK")
            raise ConfigError(f"the environment sets {there} but not {missing}; a launcher sets both, or unset {there}")
        try:
            if "RANK" in env:
                return _of_torch(env)
            # only srun sets the tasks of a step: a batch script has SLURM_NTASKS and SLURM_PROCID=0 as well
            if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
                return _of_srun(env)
        except ValueError as error:
            raise ConfigError(f"a launcher variable (RANK, WORLD_SIZE, ...) is not a whole number: {error}") from None
        return LaunchEnv()

    def export(self) -> None:
        """Sets torchrun's variables, which libraries read, if another launcher has started this rank."""
        os.environ.setdefault("RANK", str(self.rank))
        os.environ.setdefault("WORLD_SIZE", str(self.world_size))
        os.environ.setdefault("LOCAL_RANK", str(self.local_rank))
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(self.local_world_size))


def _of_torch(env: Mapping[str, str]) -> LaunchEnv:
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK={rank} is not below WORLD_SIZE={world_size}; start every rank with its own RANK")
    # a launcher that does not give it may span hosts, so one_host is then False
    local_world_size = env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE"))
    return LaunchEnv(
        rank,
        world_size,
        local_rank=int(env.get("LOCAL_RANK", rank)),
        local_world_size=int(local_world_size or world_size),
        restart_count=int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
        launched=True,
        one_host=local_world_size is not None and int(local_world_size) == world_size,
    )


def _of_srun(env: Mapping[str, str]) -> LaunchEnv:
    """Reads a task of a step with several tasks; ``srun`` sets all these variables in each of them."""
    try:
        rank, local_rank, node = (int(env[f"SLURM_{name}"]) for name in ("PROCID", "LOCALID", "NODEID"))
        world_size = int(env["SLURM_STEP_NUM_TASKS"])
        local_world_size = _tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])[node]
    except (KeyError, IndexError) as error:
        raise ConfigError(f"SLURM_STEP_NUM_TASKS is set, but not what srun sets with it: {error}") from None
    return LaunchEnv(
        rank, world_size, local_rank, local_world_size, launched=True, one_host=local_world_size == world_size
    )


def _tasks_per_node(text: str) -> list[int]:
    """Parses ``2(x3),1`` as 2, 2, 2, 1."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # respects a scheduler's limit; macOS has no such call
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
