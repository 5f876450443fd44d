"""The command line as people start it: torchrun, sweeps, signals, mistakes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

import dtrain.__main__
from dtrain.__main__ import main
from dtrain.distributed.setup import connect, disconnect
from dtrain.errors import DtrainError
from tests.helpers.launch import (
    CORE,
    ROOT,
    SMALL,
    Job,
    checkpoints,
    command_line,
    curve,
    give_up_override,
    listing,
    losses,
    newest_step,
    summary,
    torchrun,
    train,
    write_samples,
)
from tests.helpers.mishap import Mishap
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

# the default run, smaller
QUICK = (
    "model.num_layers=2",
    "model.hidden_dim=64",
    "model.num_heads=2",
    "model.max_seq_len=64",
    "train.steps=40",
    "train.micro_batch_size=2",
    "train.global_batch_size=8",
    "train.log_every=1",
    "train.eval_every=20",
    "train.save_every=20",
    "train.eval_batches=4",
    "train.sample_tokens=16",
    "launch.threads_per_rank=1",
)
ENDLESS = ("train.steps=100000", "train.save_every=0", "train.eval_every=0")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_samples(tmp_path_factory.mktemp("data"))


def exit_codes(job: Job) -> dict[int, int]:
    """Exit code of each rank that failed, as torchrun reports it."""
    found = re.findall(r"rank +: (\d+) .*\n +exitcode +: (-?\d+)", job.output)
    return {int(rank): int(code) for rank, code in found}


def test_two_ranks_train_like_one_and_leave_one_run_directory(tmp_path: Path) -> None:
    """Promise P5 without ``engine.reproducible``; run directory and precision are not given on the command line."""
    folder = tmp_path / "two"
    with torchrun(folder, *QUICK, "report=false", env={"DTRAIN_PRECISION": "fp32"}) as job:
        assert train(tmp_path / "one", *QUICK, "precision=fp32") == [0]  # while torch is imported there
        assert job.wait() == 0, job.output
    runs = [path for path in folder.iterdir() if path.suffix != ".log"]
    assert [path.name for path in runs] == ["runs"]
    (run_dir,) = (folder / "runs").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", run_dir.name)
    assert listing(run_dir) == listing(tmp_path / "one")
    files = [path.name for path in sorted((run_dir / "checkpoints/step-00000040").iterdir())]
    assert files == ["manifest.json", "r0000.safetensors", "r0001.safetensors"]
    assert yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))["precision"]["name"] == "fp32"
    one, two = losses(tmp_path / "one"), losses(run_dir)
    assert len(two) == 40
    assert two[-1] < two[0] - 1  # it learns
    assert two == pytest.approx(one, rel=5e-3)
    assert summary(run_dir)["val_loss"] == pytest.approx(summary(tmp_path / "one")["val_loss"], rel=5e-3)
    assert summary(run_dir)["world_size"] == 2


@pytest.mark.parametrize("world", [1, 2])
def test_sweep(tmp_path: Path, data: str, world: int) -> None:
    folder = tmp_path / "sweep"
    argv = [*SMALL, data, "train.steps=3", f"run_dir={folder}", "-m", "optim.lr=1e-3,2e-3"]
    if world == 1:
        assert command_line(tmp_path / "log", *argv) == 0
        log = (tmp_path / "log").read_text()
    else:
        with Job([str(ROOT / "launch/torchrun.sh"), *argv], tmp_path, {"NPROC": "2"}) as job:
            assert job.wait() == 0, job.output
            log = job.output
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    expected = [
        "checkpoints/step-00000003/manifest.json",
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "precision.json",
        "summary.json",
    ]
    for number, lr in ((1, 1e-3), (2, 2e-3)):
        assert log.count(f"job {number}/2: optim.lr={lr} -> {folder}/{number}\n") == 1
        assert listing(folder / str(number)) == expected
        assert summary(folder / str(number))["world_size"] == world
        assert curve(folder / str(number))[0]["lr"] == lr / 2  # in its warm-up
        config = yaml.safe_load((folder / f"{number}/config.yaml").read_text(encoding="utf-8"))
        assert (config["optim"]["lr"], config["run_dir"]) == (lr, str(folder))
    assert losses(folder / "1") != losses(folder / "2")


def test_fp16_with_zero_2(tmp_path: Path, data: str) -> None:
    """The first scale is too large: steps are skipped until it is not. Then it grows until it is too large again."""
    run_dir, scale = tmp_path / "run", 2.0**18
    given = [f"precision.loss_scale.init={scale}", "precision.loss_scale.growth_interval=3"]
    assert train(run_dir, *CORE, data, "precision=fp16", "engine.zero_stage=2", *given, world=2) == [0, 0]
    clean = skipped = 0
    for line in curve(run_dir):
        if "loss" in line:
            assert line["loss_scale"] == scale
            assert line.get("reason") == (None if line["applied"] else "overflow")
            clean = clean + 1 if line["applied"] else 0
            skipped += not line["applied"]
            assert line["skipped_steps"] == skipped
            scale *= 0.5 if not line["applied"] else 2.0 if clean % 3 == 0 else 1.0
    assert 0 < skipped < 9
    assert losses(run_dir)[-1] < losses(run_dir)[0]
    assert summary(run_dir)["skipped_steps"] == skipped
    assert summary(run_dir)["precision"] == "fp16"
    assert summary(run_dir)["contract"]["master"] == "fp32"


# -- stop signals ------------------------------------------------------------------------------------------------------


def test_signals_to_the_ranks_of_a_job(tmp_path: Path, data: str) -> None:
    """To one, then to both, as a scheduler and a launcher do together; long steps, and rank 0 slow to finish."""
    run_dir = tmp_path / "run"
    command = [*SMALL, data, *ENDLESS, "train.global_batch_size=240", f"run_dir={run_dir}"]
    with torchrun(tmp_path, *command, env=Mishap("summary", 1, "sleep", rank=0).env()) as job:
        job.wait_for_step(run_dir, 1)
        job.signal_ranks(signal.SIGTERM, 0)
        job.signal_ranks(signal.SIGTERM, 0, 1)
        assert job.wait() == 1  # torchrun's own
        assert exit_codes(job) == {0: 75, 1: 75}
        assert "by SIGTERM after saving" in job.output
        assert job.gone()
    last = curve(run_dir)[-1]["step"]
    assert checkpoints(run_dir) == [f"step-{last:08d}"]
    assert newest_step(run_dir) == last
    assert (summary(run_dir)["finished"], summary(run_dir)["steps"]) == (False, last)
    before = curve(run_dir)
    assert train(run_dir, *SMALL, data, f"train.steps={last + 1}", world=2) == [0, 0]
    assert curve(run_dir)[: len(before)] == before
    assert [line["step"] for line in curve(run_dir)[len(before) :]] == [last + 1, last + 1]


def test_sigterm_to_torchrun(tmp_path: Path, data: str) -> None:
    run_dir = tmp_path / "run"
    with torchrun(tmp_path, *SMALL, data, *ENDLESS, f"run_dir={run_dir}") as job:
        job.wait_for_step(run_dir, 3)
        os.kill(job.pid, signal.SIGTERM)
        job.wait()
        assert job.gone()
    last = curve(run_dir)[-1]["step"]
    assert newest_step(run_dir) == last
    assert summary(run_dir)["steps"] == last


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
    for before, after in run_ranks(2, _threads_of_gloo):
        assert before > 0
        assert after == 0


# -- mistakes ----------------------------------------------------------------------------------------------------------


MISTAKES = {
    "a typo in a key": (["optim.lrr=1"], "unknown key 'optim.lrr' with optim=adamw; did you mean 'optim.lr'?"),
    "a batch that does not divide": (["train.micro_batch_size=4"], "train.global_batch_size=6 does not divide by "),
    "a missing checkpoint": (["resume=/nonexistent/step-00000100"], "resume=/nonexistent/step-00000100: no such dir"),
    "a factory without a module": (["model.factory=tests.helpers.mishaps:build"], "no module named tests.helpers.mish"),
    "a factory without a function": (["model.factory=tests.helpers.mishap:biuld"], "did you mean 'build'?"),
    "files that are not there": (["data.files=/nonexistent/*.txt"], "data.files=/nonexistent/*.txt"),
    "a folder under a file": (["run_dir=/dev/null/run"], "run_dir=/dev/null/run cannot be created: Not a directory"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_one_line_and_leaves_nothing(tmp_path: Path, data: str, mistake: str) -> None:
    overrides, expected = MISTAKES[mistake]
    given = {override.split("=")[0] for override in overrides}
    rest = [item for item in (*SMALL, data, f"run_dir={tmp_path}/run") if item.split("=")[0] not in given]
    assert command_line(tmp_path / "log", *rest, *overrides) == 2
    log = (tmp_path / "log").read_text()
    assert re.fullmatch(r"dtrain: [^\n]+\n", log), log
    assert expected in log
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def _without_privilege(rank: int, world: int, argv: list[str], log: str) -> int:
    give_up_override()
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    return main(["train", *argv])


@pytest.mark.parametrize("inside", ["", "/run"])
def test_read_only_run_directory(tmp_path: Path, data: str, inside: str) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    argv = [*SMALL, data, f"run_dir={closed}{inside}"]
    assert run_ranks(1, _without_privilege, argv, f"{tmp_path}/log") == [2]
    log = (tmp_path / "log").read_text()
    last = log.splitlines()[-1]
    assert re.match(f"dtrain: .*{closed}", last), log
    assert "Permission denied" in last
    assert "Traceback" not in log
    assert list(closed.iterdir()) == []


def test_batch_that_the_ranks_cannot_share(tmp_path: Path, data: str) -> None:
    """All ranks refuse; only rank 0 prints the reason."""
    with torchrun(tmp_path, *SMALL, data, "train.global_batch_size=3", "run_dir=run") as job:
        assert job.wait() == 1
        (line,) = [line for line in job.output.splitlines() if "dtrain: " in line]
        assert line == (
            "dtrain: train.global_batch_size=3 does not divide by train.micro_batch_size=1 x 2 ranks; "
            "the nearest that do: 2 or 4"
        )
        assert set(exit_codes(job).values()) <= {2, -15}
        assert 2 in exit_codes(job).values()
        assert f'File "{ROOT}/dtrain/' not in job.output
    assert not (tmp_path / "run").exists()


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
    assert run_ranks(2, _signal_before_the_error_is_printed, argv) == [2, 2]


def test_error_in_the_model_on_one_rank_ends_all(tmp_path: Path, data: str) -> None:
    run_dir = tmp_path / "run"
    mishap = Mishap("forward", 20, "raise", rank=1)
    options = ["checkpoint.asynchronous=false", f"run_dir={run_dir}"]  # step 4 is saved by then, however slow the disk
    with torchrun(tmp_path, *SMALL, data, *options, env=mishap.env()) as job:
        assert job.wait() == 1
        assert "RuntimeError: the model broke" in job.output
        assert "in happen" in job.output  # with the traceback of the user's own code
        assert exit_codes(job)[1] == 1
        assert job.gone()
    assert newest_step(run_dir) == 4
