"""The start of a run without the cost of launchers: stand-ins for the ranks of a command, mistakes, ends, signals."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import dtrain
import dtrain.__main__
from dtrain.__main__ import main
from dtrain.distributed.startup.setup import connect, disconnect
from dtrain.distributed.transport import own_groups
from dtrain.errors import DtrainError, LaunchError
from dtrain.integrations.accelerate import Accelerator
from dtrain.train import launcher
from dtrain.train.launcher import exit_code
from tests.helpers.launch import SMALL, command_line, fork_command, summary
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

LONG_S = 60.0  # a group waits for others for 30 minutes
SHORT = ("train.steps=2", "train.save_every=0", "train.eval_every=0", "checkpoint.save_at_end=false")


STAND_IN = """#!{python} -IS
# a rank: writes what it was started with, then does what the name of the case says
import json, os, signal, sys, time
folder, case = sys.argv[-2:]
rank = int(os.environ["RANK"])
signal.signal(signal.SIGUSR1, lambda *_: os._exit(75))
names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "PYTHONPATH", "DTRAIN_LAUNCHER_PID")
started = dict(argv=sys.argv[1:], parent=os.getppid(), pid=os.getpid(), **dict((n, os.environ[n]) for n in names))
listens = [line.split()[1] for line in open("/proc/net/tcp") if line.split()[3] == "0A"]
started["loopback"] = f"0100007F:{{int(os.environ['MASTER_PORT']):04X}}" in listens
with open(f"{{folder}}/{{rank}}.new", "w") as file:
    json.dump(started, file)
os.rename(f"{{folder}}/{{rank}}.new", f"{{folder}}/{{rank}}.json")
while not os.path.exists(f"{{folder}}/{{1 - rank}}.json"):
    time.sleep(0.01)
if case == "done":
    sys.exit(0)
if rank == 1:
    if case == "refused":
        sys.exit(2)
    if case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if case in ("SIGUSR1", "SIGHUP"):
        os.kill(os.getppid(), getattr(signal, case))
time.sleep(60)
"""


def _launch(rank: int, world: int, folder: str, case: str) -> tuple[int | str, int, bool]:
    """Returns exit code or error, this process, and whether its environment and handlers are as before."""
    before = dict(os.environ), [signal.getsignal(number) for number in launcher.STOP_SIGNALS]
    next_rendezvous = launcher._Loopback.next_rendezvous

    def signalled(self: launcher._Loopback) -> object:
        if case == "early signal":
            os.kill(os.getpid(), signal.SIGUSR1)
        return next_rendezvous(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", f"{folder}/rank")
        patch.setattr(launcher._Loopback, "next_rendezvous", signalled)
        result: int | str
        try:
            result = launcher.launch([], 2, ["seed=3", folder, case])
        except LaunchError as error:
            result = str(error)
    after = dict(os.environ), [signal.getsignal(number) for number in launcher.STOP_SIGNALS]
    return result, os.getpid(), before == after


CASES = {
    "done": "0",
    "SIGUSR1": "75",
    "refused": "2",
    "killed": r"rank 1 \(process {pid}\) was ended by SIGKILL; the others were ended with it",
    "SIGHUP": "SIGHUP has ended this command, and with it all ranks",
    # the stand-in may not listen to it yet
    "early signal": r"75|rank \d \(process \d+\) was ended by SIGUSR1; .*",
}


@pytest.mark.parametrize("case", CASES)
def test_the_command_starts_ranks_forwards_signals_and_tells_how_they_ended(tmp_path: Path, case: str) -> None:
    (tmp_path / "rank").write_text(STAND_IN.format(python=sys.executable))
    (tmp_path / "rank").chmod(0o755)
    ((result, pid, is_restored),) = run_ranks(1, _launch, str(tmp_path), case, fresh=True, timeout=50)
    ranks = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert re.fullmatch(CASES[case].format(pid=ranks[-1]["pid"] if ranks else 0), str(result)), result
    assert is_restored
    assert len(ranks) == 2 or case == "early signal"
    for number, rank in enumerate(ranks):
        assert rank["argv"] == ["-P", "-m", "dtrain", "train", "seed=3", str(tmp_path), case]
        assert (rank["parent"], rank["DTRAIN_LAUNCHER_PID"]) == (pid, str(pid))
        assert (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"], rank["LOCAL_RANK"]) == ("2", "2", str(number))
        assert (rank["MASTER_ADDR"], rank["loopback"]) == ("127.0.0.1", True)
        assert str(Path(dtrain.__file__).parents[1]) in rank["PYTHONPATH"].split(os.pathsep)
        assert not Path(f"/proc/{rank['pid']}").exists()


@pytest.mark.parametrize(
    ("codes", "delay", "culprit"),
    [
        ((1, -9), 0, "rank 1 (process 101) was ended by SIGKILL"),
        ((1, -9), 30, "rank 0 (process 100) ended with exit code 1"),
        ((-11, -9), 0, "rank 0 (process 100) was ended by SIGSEGV"),
        ((3, -15), 0, "rank 0 (process 100) ended with exit code 3"),
        ((75, -15), 0, "rank 0 (process 100) ended with exit code 75"),
    ],
)
def test_the_culprit_is_the_first_rank_that_failed_by_itself(codes: tuple[int, int], delay: int, culprit: str) -> None:
    """As torchrun's agent reports them, which ends the second at once or half a minute later."""
    failures = {}
    for rank, code in enumerate(codes):
        failures[rank] = ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=code, error_file="")
        failures[rank].timestamp = 1000 + rank * delay
    with pytest.raises(LaunchError, match=re.escape(culprit)):
        exit_code(failures, 2)


def test_one_rank_in_a_job_of_several_tasks_is_asked_for(tmp_path: Path, data: str) -> None:
    """Without the number it is refused: ``tests.unit.train.test_run``."""
    argv = [*SMALL, data, *SHORT, f"run_dir={tmp_path}/run", "launch.num_processes=1"]
    assert command_line(tmp_path / "log", *argv, env={"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) == 0
    assert summary(tmp_path / "run")["world_size"] == 1


MISTAKES = {
    "a batch that the ranks cannot share": (["launch.num_processes=4"], "micro_batch_size=1 x 4 ranks"),
    "no number": (["launch.num_processes=two"], "launch.num_processes=two must be a number, auto"),
    "no process": (["launch.num_processes=0"], "launch.num_processes=0 is too small"),
    "no GPU": (["launch.num_processes=2", "launch.device=cuda"], "launch.device=cuda, but"),
    "a missing checkpoint": (["launch.num_processes=2", "resume=/nonexistent"], "resume=/nonexistent: no such dir"),
    "two numbers": (["-m", "launch.num_processes=1,2"], "launch.num_processes differs between the jobs ([1, 2])"),
    "a factory without a module": (["model.factory=tests.helpers.mishaps:build"], "no module named tests.helpers.mish"),
    "a factory without a function": (["model.factory=tests.helpers.mishap:biuld"], "did you mean 'build'?"),
    "files that are not there": (["data.files=/nonexistent/*.txt"], "data.files=/nonexistent/*.txt"),
    "a folder under a file": (["run_dir=/dev/null/run"], "run_dir=/dev/null/run cannot be created: Not a directory"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_starts_nothing(tmp_path: Path, data: str, mistake: str) -> None:
    overrides, expected = MISTAKES[mistake]
    given = {override.split("=")[0] for override in overrides}
    rest = [item for item in (*SMALL, data, f"run_dir={tmp_path}/run") if item.split("=")[0] not in given]
    assert command_line(tmp_path / "log", *rest, *overrides) == 2
    log = (tmp_path / "log").read_text()
    assert re.fullmatch(r"dtrain: [^\n]+\n", log), log
    assert expected in log
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def _signal_before_the_error_is_printed(rank: int, world: int, argv: list[str]) -> int:
    real = dtrain.__main__._fail

    def fail(error: DtrainError) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(error)

    dtrain.__main__._fail = fail
    return main(["train", *argv, f"seed={rank}"])  # which all ranks refuse


def test_a_signal_of_the_launcher_does_not_hide_the_error(tmp_path: Path, data: str) -> None:
    """The launcher sends it when another rank has ended; this rank may not have printed yet why it ends too."""
    argv = [*SMALL, data, f"run_dir={tmp_path / 'run'}"]
    assert run_ranks(2, _signal_before_the_error_is_printed, argv, fresh=True) == [2, 2]


def meeting(port: int) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_a_port_that_is_taken_is_named(tmp_path: Path, data: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command_line(tmp_path / "log", *SMALL, data, f"run_dir={tmp_path}/run", env=meeting(port)) == 2
    at = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    expected = f"dtrain: cannot hold the store of the ranks at {at}: [Errno 98] Address already in use"
    assert (tmp_path / "log").read_text().startswith(expected)


def test_a_signal_ends_a_rank_that_waits_for_the_others_to_connect(tmp_path: Path, data: str) -> None:
    """There is nothing to save, and the launcher would wait for this rank."""
    port = free_port()
    process = fork_command(tmp_path / "log", *SMALL, data, f"run_dir={tmp_path / 'run'}", env=meeting(port))
    while f" 0100007F:{port:04X} 00000000:0000 0A " not in Path("/proc/net/tcp").read_text():
        assert process.is_alive(), (tmp_path / "log").read_text()
        time.sleep(0.02)
    time.sleep(0.2)  # until it waits
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == -signal.SIGTERM


def _threads_of_gloo(rank: int, world: int) -> list[int]:
    def count() -> int:
        return sum("gloo" in (task / "comm").read_text() for task in Path("/proc/self/task").iterdir())

    comm = connect(torch.device("cpu"))
    comm.barrier()
    before = count()
    comm.release()
    disconnect()
    assert not dist.is_initialized()
    return [before, count()]


def test_no_thread_outlives_the_process_group() -> None:
    """One that holds the last tensor when the interpreter ends aborts a process that has done all its work."""
    assert all(before > 0 == after for before, after in run_ranks(2, _threads_of_gloo))


def _begin(rank: int, world: int, port: int, maker: str) -> list[Callable[[], None]]:
    """Takes a step over a group of ``maker``; returns the functions that are registered for the exit, first to last."""
    dist.destroy_process_group()  # a user's script has none
    os.environ.update(meeting(port) | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)})
    functions: list[Callable[[], None]] = []
    with mock.patch.object(atexit, "register", lambda fn, *args: functions.append(partial(fn, *args))):
        if maker == "accelerate":
            Accelerator(cpu=True)
        elif maker == "user":
            dist.init_process_group("gloo")
        engine = dtrain.initialize(torch.nn.Linear(8, 8), precision="fp32", seed=0)
        engine.prepare_saves()  # makes a second group
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    return [*reversed(functions), own_groups._let_threads_release]


def _leave(rank: int, world: int, port: int, maker: str, fails: bool) -> tuple[bool, int, bool]:
    """Runs a rank's exit functions; returns whether its group was there, how many are left, and if that was soon."""
    functions = _begin(rank, world, port, maker)
    before, work = dist.is_initialized(), None
    if fails:
        sys.last_value = ZeroDivisionError("on purpose")
        if rank == 0:  # rank 1 never joins it
            work = dist.all_reduce(torch.ones(3), async_op=True)
    began = time.monotonic()
    for function in functions:
        function()
    left = len(dist.distributed_c10d._world.pg_map)
    del work
    return before, left, time.monotonic() - began < LONG_S


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("maker", ["initialize", "accelerate", "user"])
def test_exit_functions_end_the_groups_that_dtrain_made(maker: str, fails: bool) -> None:
    """Also after an exception, without a wait for the other ranks; a group of the user stays."""
    left = run_ranks(2, _leave, free_port(), maker, fails, fresh=True)
    assert left == [(True, int(maker == "user"), True)] * 2


def _fork_and_end(rank: int, world: int, port: int) -> list[Any]:
    functions = _begin(rank, world, port, "initialize")
    child = os.fork()
    if child == 0:
        for function in functions:  # of a script that ends
            function()
        os._exit(5 if dist.is_initialized() else 1)
    deadline = time.monotonic() + LONG_S
    ended = os.waitpid(child, os.WNOHANG)
    while not ended[0] and time.monotonic() < deadline:
        time.sleep(0.02)
        ended = os.waitpid(child, os.WNOHANG)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    sums = torch.ones(1)
    dist.all_reduce(sums)
    return [os.waitstatus_to_exitcode(ended[1]) if ended[0] else "hangs", sums.item()]


def test_a_forked_process_leaves_the_group_to_its_parent() -> None:
    """It has none of the threads that an end of the group waits for."""
    assert run_ranks(2, _fork_and_end, free_port(), fresh=True) == [[5, 2.0]] * 2


def test_the_exit_waits_for_threads_of_gloo_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has not dropped its tensor when the interpreter ends would abort the process."""
    states = iter([["S", "R"], ["S", "S"], ["S", "S"], ["R", "S"], ["S", "S"], ["S", "S"], ["S", "S"], ["S", "S"], []])
    monkeypatch.setattr(own_groups, "_gloo_threads", lambda: next(states))
    own_groups._let_threads_release()
    assert list(states) == [[]]
    monkeypatch.setattr(own_groups, "_gloo_threads", lambda: ["R"])
    monkeypatch.setattr(own_groups, "_LIMIT_S", 0.1)
    began = time.monotonic()
    own_groups._let_threads_release()
    assert 0.1 <= time.monotonic() - began < 5
