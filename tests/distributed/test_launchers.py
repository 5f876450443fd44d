"""Each launcher: its ranks, sweeps, stop signals, a killed rank, and the addresses on which it listens."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from dtrain.distributed.launch_env import LaunchEnv
from dtrain.errors import ConfigError, LaunchError
from dtrain.train.launcher import exit_code
from tests.helpers.fault_counts import FaultCounts
from tests.helpers.launch import (
    LAUNCHER,
    ROOT,
    SMALL,
    Job,
    command_line,
    deepspeed_sh,
    listing,
    newest_step,
    python,
    record_of,
    sbatch,
    started,
    summary,
    torchrun,
    train,
    write_samples,
)

pytestmark = pytest.mark.processes

ENDLESS = ("train.steps=100000", "train.save_every=0", "train.eval_every=0")
SHORT = ("train.steps=2", "train.save_every=0", "train.eval_every=0", "checkpoint.save_at_end=false")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_samples(tmp_path_factory.mktemp("data"))


def listening(job: Job) -> set[str]:
    """The addresses, in hexadecimal, on which processes of ``job`` listen."""
    inodes = set()
    for pid, _ in job.processes():
        with contextlib.suppress(FileNotFoundError):  # a process that has ended since
            for entry in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):  # a file that it has closed since
                    inodes.add(re.sub(r"socket:\[(\d+)\]", r"\1", os.readlink(f"/proc/{pid}/fd/{entry}")))
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and line[9] in inodes}


LOOPBACK = {"0100007F"}


def lines_of_dtrain(job: Job) -> list[str]:
    return [line for line in job.output.splitlines() if line.startswith("dtrain: ")]


# -- launch.num_processes ----------------------------------------------------------------------------------------------


def stopped_in_a_sweep(folder: Path, job: Job, number: signal.Signals) -> None:
    """``job`` sweeps ``SWEEP`` in ``folder``; its second run is stopped by a signal to the command itself."""
    job.wait_for_step(folder / "2", 2)
    assert listening(job) == LOOPBACK
    assert sorted(job.ranks()) == [0, 1]
    os.kill(job.pid, number)
    assert job.wait() == 75, job.output
    assert job.gone()
    assert lines_of_dtrain(job) == []
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    for run, steps in ((1, 2), (2, 100000)):
        assert job.output.count(f"job {run}/2: train.steps={steps} -> {folder}/{run}\n") == 1
        assert summary(folder / str(run))["finished"] == (run == 1)
        assert summary(folder / str(run))["world_size"] == 2
        assert newest_step(folder / str(run)) == summary(folder / str(run))["steps"]
    assert listing(folder / "1") == [
        "checkpoints/step-00000002/manifest.json",
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "precision.json",
        "summary.json",
    ]


SWEEP = ("-m", "train.steps=2,100000", "train.save_every=0", "train.eval_every=0")


def test_ranks_that_the_command_starts(tmp_path: Path, data: str) -> None:
    """A stop signal to the command; then its sudden end, after which the ranks save too."""
    folder, run_dir = tmp_path / "sweep", tmp_path / "sweep/2"
    with started(tmp_path, *SMALL, data, f"run_dir={folder}", *SWEEP) as job:
        stopped_in_a_sweep(folder, job, signal.SIGUSR1)
    last = newest_step(run_dir)
    with started(tmp_path, *SMALL, data, *ENDLESS, f"run_dir={run_dir}") as job:
        job.wait_for_step(run_dir, last + 2)
        os.kill(job.pid, signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        assert job.gone(), job.output
    assert newest_step(run_dir) > last


MISTAKES = {
    "a batch that the ranks cannot share": (
        ["launch.num_processes=4"],
        "train.global_batch_size=6 does not divide by train.micro_batch_size=1 x 4 ranks",
    ),
    "no number": (["launch.num_processes=two"], "launch.num_processes=two must be a number, auto"),
    "no process": (["launch.num_processes=0"], "launch.num_processes=0 is too small"),
    "no GPU": (["launch.num_processes=2", "launch.device=cuda"], "launch.device=cuda, but"),
    "a missing checkpoint": (["launch.num_processes=2", "resume=/nonexistent"], "resume=/nonexistent: no such dir"),
    "two numbers": (["-m", "launch.num_processes=1,2"], "launch.num_processes differs between the jobs ([1, 2])"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_starts_nothing(tmp_path: Path, data: str, mistake: str) -> None:
    overrides, expected = MISTAKES[mistake]
    assert command_line(tmp_path / "log", *SMALL, data, f"run_dir={tmp_path}/run", *overrides) == 2
    log = (tmp_path / "log").read_text()
    assert re.fullmatch(r"dtrain: [^\n]+\n", log), log
    assert expected in log
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_auto_is_one_process_on_a_cpu_and_the_launchers_number_under_one(tmp_path: Path, data: str) -> None:
    argv = [*SMALL, data, *SHORT, f"run_dir={tmp_path}/run", "launch.device=cpu"]
    assert command_line(tmp_path / "log", *argv, "launch.num_processes=auto") == 0
    assert summary(tmp_path / "run")["world_size"] == 1
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for number in ("auto", "1"):
        argv[-2] = f"run_dir={tmp_path}/run-{number}"
        assert command_line(tmp_path / "log", *argv, f"launch.num_processes={number}", env=one_rank) == 0
    assert command_line(tmp_path / "contradiction", *argv, "launch.num_processes=2", env=one_rank) == 2
    log = (tmp_path / "contradiction").read_text()
    assert log.startswith("dtrain: launch.num_processes=2, but a launcher has started 1 ranks on this host")


# -- a rank that is killed ---------------------------------------------------------------------------------------------


def deepspeed(folder: Path, *argv: str) -> Job:
    """The launcher itself, without ``--local_rank`` in argv."""
    options = ["--no_local_rank", "--num_gpus", "2", "--master_port", str(20000 + os.getpid() % 10000)]
    return Job(["deepspeed", *options, str(ROOT / "launch/train.py"), *argv], folder)


# SLURM gives the highest code of its tasks: 128 + SIGKILL, or + SIGTERM if it ends the other rank while that one exits
LAUNCHERS: dict[str, tuple[Callable[..., Job], set[int], str]] = {
    "launch.num_processes": (started, {1}, r"dtrain: rank 1 \(process {pid}\) was ended by SIGKILL; "),
    # it looks once a second, and takes the code of the lower rank if both have ended since
    "deepspeed": (deepspeed, {247, 1}, r"exits with return code = (-9|1)"),
    "srun": (sbatch, {137, 143}, r"task 1: -9"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_is_killed_ends_the_job_and_is_named(
    tmp_path: Path, data: str, faults: FaultCounts, launcher: str
) -> None:
    start, codes, report = LAUNCHERS[launcher]
    run_dir = tmp_path / "run"
    # it saves all the time, in threads that communicate over a group of their own
    with start(tmp_path, *SMALL, data, *ENDLESS, "train.save_every=1", f"run_dir={run_dir}") as job:
        job.wait_for_step(run_dir, 4)
        assert listening(job) == LOOPBACK
        pid = job.ranks()[1]
        os.kill(pid, signal.SIGKILL)
        assert job.wait() in codes, job.output
        assert job.gone()
    assert re.search(report.format(pid=pid), job.output), job.output
    assert re.search(
        rf"^dtrain: rank 1 \(process {pid}\) has ended, so this rank ends too; seen as: ", job.output, re.M
    )
    assert "Traceback" not in job.output
    faults.passed("P15", 1)


def ranks_of_attempt(job: Job, number: int) -> list[int]:
    """The ranks that torchrun has started after ``number`` restarts."""
    found = {"TORCHELASTIC_RESTART_COUNT": str(number)}
    return [pid for pid, env in job.processes() if found.items() <= env.items()]


@pytest.mark.parametrize(
    "repetition", [0, *(pytest.param(number, marks=pytest.mark.exhaustive) for number in range(1, 10))]
)
def test_torchrun_restarts_after_a_rank_was_killed(tmp_path: Path, data: str, repetition: int) -> None:
    """Twice: in a step, and while the next attempt starts. The bits are those of an uninterrupted run."""
    rng, run_dir = random.Random(repetition), tmp_path / "run"
    config = [*SMALL, data, "train.steps=40", f"run_dir={run_dir}"]
    with torchrun(tmp_path, *config, options=["--max-restarts=2"]) as job:
        job.wait_for_step(run_dir, rng.randint(1, 25))
        victim = rng.randrange(2)
        pid = job.ranks()[victim]
        os.kill(pid, signal.SIGKILL)
        job.wait_until(lambda: len(ranks_of_attempt(job, 1)) == 2)
        second = ranks_of_attempt(job, 1)[rng.randrange(2)]
        time.sleep(rng.uniform(0, 3))
        os.kill(second, signal.SIGKILL)
        assert job.wait() == 0, job.output
        assert job.gone()
    assert re.search(
        rf"^dtrain: .*rank {victim} \(process {pid}\) has ended, so this rank ends too; ", job.output, re.M
    )
    config[-1] = f"run_dir={tmp_path / 'whole'}"
    assert train(tmp_path / "whole", *config[:-1], world=2) == [0, 0]
    assert record_of(run_dir) == record_of(tmp_path / "whole")


def test_a_signal_ends_a_rank_that_waits_for_the_others_to_connect(tmp_path: Path, data: str) -> None:
    """There is nothing to save, and the launcher would wait for this rank."""
    port = 10000 + os.getpid() % 10000
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with python(tmp_path, *SMALL, data, f"run_dir={tmp_path / 'run'}", env=env) as job:
        job.wait_until(lambda: listening(job) == LOOPBACK)
        time.sleep(0.5)
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait() == -signal.SIGTERM


def test_a_port_that_is_taken_is_named(tmp_path: Path, data: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        assert command_line(tmp_path / "log", *SMALL, data, f"run_dir={tmp_path}/run", env=env) == 2
    log = (tmp_path / "log").read_text()
    address = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    assert log.startswith(
        f"dtrain: cannot hold the store of the ranks at {address}: [Errno 98] Address already in use"
    ), log


def ended(*codes: int, late: Sequence[int] = ()) -> dict[int, ProcessFailure]:
    """Failed ranks as torchrun's agent reports them: the first, then those that it ended half a minute later."""
    failures = {}
    for rank, code in enumerate((*codes, *late)):
        failures[rank] = ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=code, error_file="")
        failures[rank].timestamp = 1030 if rank >= len(codes) else 1000
    return failures


@pytest.mark.parametrize(
    ("failures", "culprit"),
    [
        (ended(1, -9), "rank 1 (process 101) was ended by SIGKILL"),
        (ended(1, late=[-9]), "rank 0 (process 100) ended with exit code 1"),
        (ended(-11, -9), "rank 0 (process 100) was ended by SIGSEGV"),
        (ended(3, -15), "rank 0 (process 100) ended with exit code 3"),
        (ended(75, -15), "rank 0 (process 100) ended with exit code 75"),
    ],
)
def test_the_culprit_is_the_first_rank_that_failed_by_itself(failures: dict[int, ProcessFailure], culprit: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(culprit)):
        exit_code(failures, 2)


def test_exit_codes_of_the_command_that_starts_ranks() -> None:
    assert exit_code({}, 2) == 0
    assert exit_code(ended(75, 75), 2) == 75
    assert exit_code(ended(2, -15), 2) == 2


# -- DeepSpeed's launcher and SLURM ------------------------------------------------------------------------------------


def test_deepspeed_sweeps_and_passes_a_stop_signal_on(tmp_path: Path, data: str) -> None:
    folder = tmp_path / "sweep"
    with deepspeed_sh(tmp_path, *SMALL, data, f"run_dir={folder}", *SWEEP) as job:
        stopped_in_a_sweep(folder, job, signal.SIGTERM)
        assert "--local_rank=1" in job.output


def test_slurm_on_two_nodes(tmp_path: Path, data: str) -> None:
    run_dir = tmp_path / "run"
    with sbatch(tmp_path, *SMALL, data, *ENDLESS, f"run_dir={run_dir}", nodes=2) as job:
        job.wait_for_step(run_dir, 2)
        os.kill(job.pid, signal.SIGUSR1)
        assert job.wait() == 75, job.output
        assert job.gone()
    assert summary(run_dir)["world_size"] == 2
    assert newest_step(run_dir) == summary(run_dir)["steps"]


STEP = {"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_PROCID": "6", "SLURM_LOCALID": "0"}


def test_environment_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"SLURM_NTASKS": "7", "SLURM_PROCID": "0"}.items():  # of a batch script
        monkeypatch.setenv(name, value)
    assert not LaunchEnv.read().launched
    for name, value in {**STEP, "SLURM_NODEID": "3"}.items():
        monkeypatch.setenv(name, value)
    assert LaunchEnv.read() == LaunchEnv(6, 7, 0, 1, launched=True, one_host=False)
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert LaunchEnv.read().local_world_size == 2
    monkeypatch.delenv("SLURM_LOCALID")
    with pytest.raises(ConfigError, match="SLURM_LOCALID"):
        LaunchEnv.read()
    monkeypatch.setenv("RANK", "1")  # torchrun, one task a node
    monkeypatch.setenv("WORLD_SIZE", "14")
    assert LaunchEnv.read().world_size == 14


def test_one_rank_in_a_job_of_several_tasks_is_asked_for(tmp_path: Path, data: str) -> None:
    """Without the number it is refused: ``tests.unit.train.test_run``."""
    argv = [*SMALL, data, *SHORT, f"run_dir={tmp_path}/run", "launch.num_processes=1"]
    assert command_line(tmp_path / "log", *argv, env={"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) == 0
