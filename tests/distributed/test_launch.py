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
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import dtrain
import dtrain.__main__
from dtrain.__main__ import main
from dtrain.distributed.startup import setup
from dtrain.distributed.startup.setup import connect, disconnect
from dtrain.errors import DtrainError, LaunchError
from dtrain.train import launcher
from dtrain.train.launcher import exit_code
from tests.helpers.launch import SMALL, command_line, fork_command, summary, write_samples
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

SHORT = ("train.steps=2", "train.save_every=0", "train.eval_every=0", "checkpoint.save_at_end=false")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_samples(tmp_path_factory.mktemp("data"))


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


def leave(rank: int, world: int, port: int, fails: bool) -> tuple[bool, bool, bool]:
    """Runs a rank's exit functions; returns whether its group was there before and after, and if it has waited."""
    dist.destroy_process_group()  # a user's script has none
    os.environ.update(meeting(port) | {"RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)})
    functions: list[Callable[[], None]] = []
    with mock.patch.object(atexit, "register", lambda fn, *args: functions.append(partial(fn, *args))):
        engine = dtrain.initialize(torch.nn.Linear(8, 8), precision="fp32", seed=0)
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    before = dist.is_initialized()
    if fails:
        sys.last_value = ZeroDivisionError("on purpose")
    began = time.monotonic()
    for function in (*reversed(functions), setup._let_gloo_release):
        function()
    return before, dist.is_initialized(), time.monotonic() - began >= setup._RELEASE_S


@pytest.mark.parametrize("fails", [False, True])
def test_exit_functions_end_the_group_that_initialize_made(fails: bool) -> None:
    """After an exception it stays, for the other ranks may never answer, and gloo's threads get time to release."""
    assert run_ranks(2, leave, free_port(), fails, fresh=True) == [(True, fails, fails)] * 2
