"""Whole training runs in real processes, started by torchrun, by python or by a fork, and readers of their files."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from dtrain.__main__ import main
from dtrain.checkpoint import open_newest, verify
from dtrain.cli.resolve import compose
from dtrain.config.schema import RunConfig, SuperviseConfig
from dtrain.errors import DtrainError
from dtrain.planning.plans import RunPlanner
from dtrain.telemetry.metrics import TIMES, read_metrics
from dtrain.train.run import run_training
from tests.helpers.checkpoints import ALONE
from tests.helpers.mishap import FACTORY
from tests.helpers.ranks import RankFailure, fork, run_ranks
from tests.helpers.remote_shell import MARK

ROOT = Path(__file__).parents[2]
SEQ_LEN = 32
PATIENCE = 240.0  # seconds; every wait ends as soon as its condition holds, and a busy machine may need minutes
LAUNCHER = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
    "DTRAIN_PRECISION",
)

# what the report imports takes each process seconds; dropout, so that random numbers matter; six micro-batches a step,
# for 1, 2 or 3 ranks
_MODEL = f"model.num_layers=1 model.hidden_dim=32 model.num_heads=2 model.max_seq_len={SEQ_LEN} model.dropout=0.1"
_BATCHES = "data=text schedule.warmup_steps=2 train.steps=12 train.micro_batch_size=1 train.global_batch_size=6"
_TIMES = "train.log_every=1 train.save_every=4 train.eval_every=6 train.eval_batches=2 train.sample_tokens=0"
CORE = (FACTORY, *f"report=false {_MODEL} {_BATCHES} {_TIMES} launch.threads_per_rank=1".split())
# and a loss scale that grows on the way, so that its state matters; BF16 is slow on a CPU without its instructions
_SCALE = "precision.loss_scale"
SMALL = (*CORE, *f"precision=fp32 {_SCALE}.mode=dynamic {_SCALE}.init=1024 {_SCALE}.growth_interval=5".split())


def is_gone(pid: int | str) -> bool:
    """Whether a process has ended, also if nobody has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def rank_variables(rank: int, world: int, per_host: int | None = None) -> dict[str, str]:
    """The variables that launchers set for a rank, without those of the meeting point."""
    local = per_host or world
    numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
    return {name: str(number) for name, number in numbers.items()}


def write_samples(folder: Path) -> str:
    """Writes a text whose windows of ``SEQ_LEN`` tokens all begin with their number; returns the override to use it.

    41 of its windows are for training, so that a run of ``SMALL`` goes into its second epoch.
    """
    text = "".join(f"{number:03d} " * (SEQ_LEN // 4) for number in range(44))
    (folder / "samples.txt").write_text(text, encoding="ascii")
    return f"data.files={folder / 'samples.txt'}"


@dataclass(frozen=True)
class Record:
    """Everything that must be equal, bit by bit, in two equal runs."""

    curve: list[dict[str, Any]]
    step: int
    state: dict[str, Any]
    tensors: dict[tuple[str, str], bytes]


def record_of(run_dir: Path) -> Record:
    """The curve of a run and its newest checkpoint."""
    reader = open_newest(run_dir, ALONE)
    tensors = {(t.kind, t.name): reader.read(t.kind, t.name).numpy().tobytes() for t in reader.tensors}
    assert {kind for kind, _ in tensors} == {"master", "exp_avg", "exp_avg_sq"}
    state = {key: reader.state[key] for key in ("engine_state", "rng", "data_cursor")}
    return Record(curve(run_dir), reader.step, state, tensors)


def curve(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` without what depends on the clock; none where there is no file yet."""
    path = run_dir / "metrics.jsonl"
    lines = read_metrics(path) if path.exists() else []
    return [{key: line[key] for key in line if key not in TIMES} for line in lines]


def losses(run_dir: Path) -> list[float]:
    """The training loss of each step."""
    return [line["loss"] for line in curve(run_dir) if "loss" in line]


def summary(run_dir: Path) -> dict[str, Any]:
    """``summary.json``."""
    values: dict[str, Any] = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return values


def listing(folder: Path) -> list[str]:
    """The paths of all files under ``folder``, without the files of each rank in a checkpoint."""
    paths = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return [path for path in paths if not path.endswith(".safetensors")]


def checkpoints(run_dir: Path) -> list[str]:
    """The names in the directory of checkpoints."""
    return sorted(path.name for path in (run_dir / "checkpoints").glob("*"))


def newest_step(run_dir: Path) -> int:
    """The step of the newest visible checkpoint, 0 where there is none; every visible one verifies."""
    names = [name for name in checkpoints(run_dir) if re.fullmatch(r"step-\d{8}", name)]
    assert not names or verify(run_dir / "checkpoints").ok
    return int(names[-1].removeprefix("step-")) if names else 0


def train_here(job: RunConfig | list[str], env: Mapping[str, str], log: str) -> int:
    """Trains in this process, or runs ``dtrain train JOB``, and appends its standard error to ``log``."""
    for name in LAUNCHER:
        os.environ.pop(name, None)
    os.environ.update(env)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), 2)
    if isinstance(job, list):
        return main(["train", *job])
    try:
        return run_training(job, planner=RunPlanner())
    except DtrainError as error:
        print(f"dtrain: {error}", file=sys.stderr)
        return error.exit_code


def _in_fork(rank: int, world: int, job: RunConfig | list[str], env: dict[str, str], log: str, alarm: float) -> int:
    if alarm and rank == world - 1:
        signal.setitimer(signal.ITIMER_REAL, alarm)  # no handler: the kernel ends the process, whatever it is doing
    code = train_here(job, env, log)
    if code == 75 and isinstance(job, RunConfig):
        os.kill(os.getpid(), signal.SIGTERM)  # as torchrun does to the others once one rank has left; it must not hurt
    return code


_composed = cache(compose)


def train(
    run_dir: Path, *overrides: str, world: int = 1, env: Mapping[str, str] | None = None, alarm: float = 0.0
) -> list[int] | None:
    """Trains in ``world`` forked processes, whose standard error is appended to ``<run_dir>.log``.

    ``alarm`` is when the last rank dies, in seconds, without a chance to do anything about it; 0: never. Returns the
    exit code of each rank; None where one of them died.
    """
    config = _composed(overrides)  # here: it takes as long as a short training
    supervise = SuperviseConfig(enabled=False, restarts=0)  # killed on purpose, often without a newer checkpoint
    config = replace(config, run_dir=str(run_dir), report=False, supervise=supervise)
    try:
        return run_ranks(world, _in_fork, config, dict(env or {}), f"{run_dir}.log", alarm, fresh=bool(env or alarm))
    except RankFailure as failure:
        if "the process died without a result" not in str(failure):
            raise
        return None


def command_line(log: Path, *argv: str, env: Mapping[str, str] | None = None) -> int:
    """The exit code of ``dtrain train ARGV`` in a forked process, whose standard error is appended to ``log``."""
    codes: list[int] = run_ranks(1, _in_fork, list(argv), dict(env or {}), str(log), 0.0)
    return codes[0]


def fork_command(log: Path, *argv: str, env: Mapping[str, str]) -> ForkServerProcess:
    """Starts ``dtrain train ARGV`` in a forked process, whose standard error is appended to ``log``."""
    return fork(_in_fork, 0, 1, list(argv), dict(env), str(log), 0.0)


def log_of(run_dir: Path) -> str:
    """Standard error of the forked ranks of a run so far."""
    return Path(f"{run_dir}.log").read_text(encoding="utf-8")


class Job:
    """A command in ``folder``, which gets its log, and all that it starts; the end of the ``with`` block kills them."""

    def __init__(self, command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> None:
        value = secrets.token_hex(8)
        self._mark = f"{MARK}={value}"
        inherited = {key: text for key, text in os.environ.items() if key not in LAUNCHER}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ours = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: value}
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / f"{value}.log"
        with self._log.open("w") as log:
            environment = {**inherited, **ours, **(env or {})}
            self._process = subprocess.Popen(list(command), cwd=folder, env=environment, stdout=log, stderr=log)
        self.pid = self._process.pid

    @property
    def output(self) -> str:
        """Standard output and standard error of all processes."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def processes(self) -> list[tuple[int, dict[str, str]]]:
        """(pid, environment) of all living processes of this job, of orphans too: they carry its mark."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                except OSError:  # another user's, or gone
                    continue
                if self._mark in words:
                    found.append((int(entry.name), dict(word.split("=", 1) for word in words if "=" in word)))
        return found

    def ranks(self) -> dict[int, int]:
        """The pid of each rank, under any launcher."""
        names = {"RANK", "SLURM_PROCID"}
        return {
            int(env[(names & env.keys()).pop()]): pid
            for pid, env in self.processes()
            if "RANK" in env or "SLURM_STEP_NUM_TASKS" in env
        }

    def kill(self) -> None:
        """Ends every process at once."""
        for pid, _ in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def exit_code(self) -> int | None:
        """Returns the exit code of the command, None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float = PATIENCE) -> int:
        """Waits for the command to end; returns its exit code."""
        deadline = time.monotonic() + timeout
        while (code := self.exit_code()) is None:
            if time.monotonic() > deadline:
                self.kill()
                pytest.fail(f"still running after {timeout:g} s; its output:\n{self.output}")
            time.sleep(0.01)
        return code

    def gone(self, timeout: float = PATIENCE) -> bool:
        """Whether all that the command started ends by itself within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.processes()

    def wait_until(self, condition: Callable[[], bool], timeout: float = PATIENCE) -> None:
        """Waits until ``condition()`` while the command runs."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self.exit_code() is not None or time.monotonic() > deadline:
                self.kill()
                pytest.fail(f"it ended or took more than {timeout:g} s; its output:\n{self.output}")
            time.sleep(0.02)

    def wait_for_step(self, run_dir: Path, step: int) -> None:
        """Waits until ``metrics.jsonl`` has the line of ``step``."""
        self.wait_until(lambda: any(line["step"] >= step for line in curve(run_dir)))

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._process.wait()


def torchrun(folder: Path, *argv: str, env: Mapping[str, str] | None = None, options: Sequence[str] = ()) -> Job:
    """``torchrun OPTIONS ... launch/train.py ARGV`` in ``folder``, as all of these on two ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *options]
    return Job([*launcher, str(ROOT / "launch/train.py"), *argv], folder, env)


def started(folder: Path, *argv: str, env: Mapping[str, str] | None = None) -> Job:
    """``python -m dtrain train ARGV launch.num_processes=2`` in ``folder``."""
    return python(folder, *argv, "launch.num_processes=2", env=env)


def deepspeed_sh(folder: Path, *argv: str, env: Mapping[str, str] | None = None) -> Job:
    """``launch/deepspeed.sh ARGV`` in ``folder``: DeepSpeed's own launcher, with ``--local_rank`` in argv."""
    return Job([str(ROOT / "launch/deepspeed.sh"), *argv], folder, {"NPROC": "2", **(env or {})})


def sbatch(folder: Path, *argv: str, nodes: int = 1, env: Mapping[str, str] | None = None) -> Job:
    """``launch/slurm.sbatch ARGV`` in ``folder`` on two tasks, in the environment of a SLURM job of one or two nodes.

    SLURM itself is not there: ``srun`` and ``scontrol`` are ``tests.helpers.remote_shell``, which starts the tasks.
    """
    return Job([*SBATCH, *argv], folder, {**slurm_job(folder, nodes), **(env or {})})


SBATCH = ("bash", str(ROOT / "launch/slurm.sbatch"))


def slurm_job(folder: Path, nodes: int, tasks: int = 2) -> dict[str, str]:
    """Returns the environment of a batch script, in which ``srun`` and ``scontrol`` are found; see ``sbatch``."""
    tools = folder / "slurm"
    tools.mkdir(parents=True)
    for name in ("srun", "scontrol"):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tests.helpers.remote_shell {name} "$@"\n')
        (tools / name).chmod(0o755)
    return {
        "PATH": f"{tools}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),  # two sessions of tests on one machine must not meet
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": "node[1-2]" if nodes == 2 else "node1",
        "SLURM_NTASKS": str(tasks),
        "SLURM_PROCID": "0",  # of the batch script itself
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }


def python(folder: Path, *argv: str, env: Mapping[str, str] | None = None) -> Job:
    """``python -m dtrain train ARGV`` in ``folder``."""
    return Job([sys.executable, "-m", "dtrain", "train", *argv], folder, env)
