"""Each launcher with real ranks: the numbers of forked ranks, stop signals, killed ranks, and where it listens."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import launch
from tests.helpers.fault_counts import FaultCounts
from tests.helpers.launch import ROOT, SMALL, Job, Record, newest_step, record_of, summary, train

pytestmark = pytest.mark.processes

QUIET = ("train.save_every=0", "train.eval_every=0")
SHORT = (*QUIET, "train.steps=4")
ENDLESS = (*QUIET, "train.steps=100000")
LOOPBACK = {"0100007F"}


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory, data: str) -> Record:
    """What two ranks without a launcher reach in ``SHORT``."""
    folder = tmp_path_factory.mktemp("forked") / "run"
    assert train(folder, *SMALL, data, *SHORT, world=2) == [0, 0]
    return record_of(folder)


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


@pytest.mark.parametrize(
    "launcher",
    [
        launch.torchrun,
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (launch.deepspeed_sh, launch.sbatch)),
    ],
)
def test_ranks_train_as_forked_ones(tmp_path: Path, data: str, forked: Record, launcher: Callable[..., Job]) -> None:
    run_dir = tmp_path / "run"
    with launcher(tmp_path, *SMALL, data, *SHORT, f"run_dir={run_dir}") as job:

        def has_connected() -> bool:
            time.sleep(0.1)  # each look reads all of /proc
            return (run_dir / "metrics.jsonl").exists()

        job.wait_until(has_connected)
        assert sorted(job.ranks()) == [0, 1]
        # torchrun's own rendezvous listens everywhere
        assert launcher is launch.torchrun or listening(job) == LOOPBACK
        assert job.wait() == 0, job.output
        assert job.gone()
    assert ("--local_rank=1" in job.output) == (launcher is launch.deepspeed_sh)
    assert record_of(run_dir) == forked
    assert summary(run_dir)["world_size"] == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("launcher", "number"), [(launch.started, signal.SIGUSR1), (launch.deepspeed_sh, signal.SIGTERM)]
)
def test_a_sweep_is_stopped_after_a_save(
    tmp_path: Path, data: str, forked: Record, launcher: Callable[..., Job], number: signal.Signals
) -> None:
    """The command gets the signal in its second run."""
    folder = tmp_path / "sweep"
    with launcher(tmp_path, *SMALL, data, *QUIET, f"run_dir={folder}", "-m", "train.steps=4,100000") as job:
        job.wait_for_step(folder / "2", 2)
        assert listening(job) == LOOPBACK
        assert sorted(job.ranks()) == [0, 1]
        os.kill(job.pid, number)
        assert job.wait() == 75, job.output
        assert job.gone()
    assert "\ndtrain: " not in job.output
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    for run, steps in ((1, 4), (2, 100000)):
        assert job.output.count(f"job {run}/2: train.steps={steps} -> {folder}/{run}\n") == 1
        assert summary(folder / str(run))["finished"] == (run == 1)
        assert newest_step(folder / str(run)) == summary(folder / str(run))["steps"]
    assert record_of(folder / "1") == forked
    files = ("config.yaml", "environment.json", "metrics.jsonl", "precision.json", "summary.json")
    assert launch.listing(folder / "1") == ["checkpoints/step-00000004/manifest.json", *files]


def test_the_script_of_slurm_takes_the_first_of_several_nodes(tmp_path: Path) -> None:
    for name, line in (("scontrol", 'printf "%s\\n" node7 node8'), ("srun", 'echo "$MASTER_ADDR $MASTER_PORT $@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "20007", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[7-8]"}
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **job}
    output = subprocess.check_output(["bash", str(ROOT / "launch/slurm.sbatch"), "seed=3"], env=env, text=True)
    assert output == "node7 10007 --kill-on-bad-exit=1 python3 -m dtrain train seed=3\n"


@pytest.mark.exhaustive
def test_ranks_whose_command_was_killed_save_too(tmp_path: Path, data: str) -> None:
    with launch.started(tmp_path, *SMALL, data, *ENDLESS, f"run_dir={tmp_path}/run") as job:
        job.wait_for_step(tmp_path / "run", 2)
        os.kill(job.pid, signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        assert job.gone(), job.output
    assert newest_step(tmp_path / "run") >= 2


def deepspeed(folder: Path, *argv: str) -> Job:
    """The launcher itself, without ``--local_rank`` in argv."""
    options = ["--no_local_rank", "--num_gpus", "2", "--master_port", str(20000 + os.getpid() % 10000)]
    return Job(["deepspeed", *options, str(ROOT / "launch/train.py"), *argv], folder)


# SLURM gives the highest code of its tasks: 128 + SIGKILL, or + SIGTERM if it ends the other rank while that one exits
KILLED: dict[str, tuple[Callable[..., Job], set[int], str]] = {
    "launch.num_processes": (launch.started, {1}, r"dtrain: rank 1 \(process {pid}\) was ended by SIGKILL; "),
    # it looks once a second, and takes the code of the lower rank if both have ended since
    "deepspeed": (deepspeed, {247, 1}, r"exits with return code = (-9|1)"),
    "srun": (launch.sbatch, {137, 143}, r"task 1: -9"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", KILLED)
def test_a_rank_that_is_killed_ends_the_job_and_is_named(
    tmp_path: Path, data: str, faults: FaultCounts, launcher: str
) -> None:
    start, codes, report = KILLED[launcher]
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
    assert re.search(rf"^dtrain: rank 1 \(process {pid}\) has ended, so this rank ends too; seen as", job.output, re.M)
    assert "Traceback" not in job.output
    faults.passed("P15", 1)


@pytest.mark.exhaustive
def test_torchrun_restarts_after_a_rank_was_killed(tmp_path: Path, data: str) -> None:
    """In a step, and while the next attempt starts. The bits are those of an uninterrupted run."""
    run_dir, config = tmp_path / "run", [*SMALL, data, "train.steps=40"]
    with launch.torchrun(tmp_path, *config, f"run_dir={run_dir}", options=["--max-restarts=2"]) as job:
        job.wait_for_step(run_dir, 9)
        pid = job.ranks()[1]
        os.kill(pid, signal.SIGKILL)

        def ranks_of_second_attempt() -> list[int]:
            return [pid for pid, env in job.processes() if env.get("TORCHELASTIC_RESTART_COUNT") == "1"]

        job.wait_until(lambda: len(ranks_of_second_attempt()) == 2)
        os.kill(ranks_of_second_attempt()[0], signal.SIGKILL)
        assert job.wait() == 0, job.output
        assert job.gone()
    assert re.search(rf"^dtrain: .*rank 1 \(process {pid}\) has ended, so this rank ends too; ", job.output, re.M)
    assert train(tmp_path / "whole", *config, world=2) == [0, 0]
    assert record_of(run_dir) == record_of(tmp_path / "whole")
