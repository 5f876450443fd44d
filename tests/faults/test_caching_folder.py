"""Ranks and jobs of two hosts over a shared folder that is slow and caches names, as NFS may."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.checkpoint import Snapshot, open_newest, save, shared_folder, storage, verify
from dtrain.checkpoint.directory import make_directories
from dtrain.checkpoint.format import integrity
from dtrain.checkpoint.lease.lease import LeaseTiming, hold
from dtrain.checkpoint.retention import Retention
from dtrain.cli.resolve import compose
from dtrain.config.schema import RunConfig, SuperviseConfig
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.setup import connect
from dtrain.errors import CheckpointError, DtrainError
from dtrain.train.run import run_training
from tests.helpers.caching_folder import CachingFolder
from tests.helpers.checkpoints import make_tensors, shards_of
from tests.helpers.launch import SMALL, losses, summary, train, write_samples
from tests.helpers.mishap import Mishap
from tests.helpers.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.processes

on_hosts = partial(run_ranks, fresh=True, timeout=120)  # because they replace functions of the system
STALE_S = 0.5
EXHAUSTIVE = pytest.mark.exhaustive


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


def see(root: Path, host: str, *, stale_s: float = STALE_S, delay_s: float = 0.0, harsh: bool = False) -> CachingFolder:
    folder = CachingFolder(root, root.with_name("journal"), host, stale_s, delay_s, harsh=harsh)
    folder.install()
    return folder


def save_step(comm: Communicator, directory: Path, step: int) -> str:
    snapshot = Snapshot(step, shards_of(make_tensors(step), comm.rank, comm.world_size), {})
    return save(directory, snapshot, comm, retention=Retention(keep_last=2)).name


def load_step(comm: Communicator, directory: Path) -> int:
    reader = open_newest(directory, comm)
    for (kind, name), tensor in make_tensors(reader.step).items():
        assert torch.equal(reader.read(kind, name), tensor.reshape(-1))
    return reader.step


# -- saves and loads ---------------------------------------------------------------------------------------------------


def _save_and_load(rank: int, world: int, root: Path, harsh: bool, delay_s: float) -> tuple[list[str], int]:
    comm = connect(torch.device("cpu"))
    see(root, f"host-{rank}", delay_s=delay_s, harsh=harsh)
    directory = root / "run" / "checkpoints"
    names = [save_step(comm, directory, step) for step in (10, 20, 30)]
    return names, load_step(comm, directory)


@pytest.mark.parametrize(("harsh", "delay_s"), [(True, 0.0), pytest.param(False, 0.01, marks=EXHAUSTIVE)])
def test_ranks_of_two_hosts_save_and_load(root: Path, harsh: bool, delay_s: float) -> None:
    results = on_hosts(2, _save_and_load, root, harsh, delay_s)
    names = ["step-00000010", "step-00000020", "step-00000030"]
    assert results == [(names, 30)] * 2
    assert sorted(path.name for path in (root / "run" / "checkpoints").iterdir()) == names[1:]
    assert verify(root / "run").ok


def _save_then_lose_sight(rank: int, world: int, root: Path, verb: str) -> str:
    comm = connect(torch.device("cpu"))
    save_step(comm, root, 10)
    save_step(comm, root, 20)
    shared_folder.LIMIT_S = 0.5
    see(root, f"host-{rank}", stale_s=60, harsh=True)
    if rank == 0:  # of the other host, whose cache lasts longer than any
        os.rename(root / "step-00000020", root / "step-00000030.tmp-ab")
        os.rename(root / "step-00000030.tmp-ab", root / "step-00000020")
    comm.barrier()
    began = time.monotonic()
    try:
        if verb == "load":
            load_step(comm, root)
        else:
            save_step(comm, root, 30)
    except CheckpointError as error:
        assert 0.5 < time.monotonic() - began < 30
        return str(error)
    return "no error"


@pytest.mark.parametrize("verb", ["save", "load"])
def test_a_rank_that_never_sees_the_folder_is_named(root: Path, verb: str) -> None:
    """It neither loads an older checkpoint in silence nor makes rank 0 quarantine a good one."""
    first, second = on_hosts(2, _save_then_lose_sight, root, verb)
    assert first == second
    assert "failed on rank 1: rank 1 on host " in first
    claim = "step-00000020, which rank 0 reads" if verb == "load" else ", which rank 0 has created"
    assert claim in first
    assert "though it waited 0.5 s because a network file system may cache names" in first
    assert sorted(path.name for path in root.iterdir()) == ["step-00000010", "step-00000020"]


def _load_timed(rank: int, world: int, root: Path, harsh: bool) -> tuple[int, float]:
    comm = connect(torch.device("cpu"))
    see(root, f"host-{rank}", harsh=harsh)
    began = time.monotonic()
    return load_step(comm, root), time.monotonic() - began


def _save_all(rank: int, world: int, root: Path) -> None:
    comm = connect(torch.device("cpu"))
    for step in (10, 20):
        save_step(comm, root, step)


def test_a_file_that_is_gone_on_all_hosts_is_refused_at_once(root: Path) -> None:
    on_hosts(2, _save_all, root)
    (root / "step-00000020" / "r0001.safetensors").unlink()  # of the share of rank 1
    for step, seconds in on_hosts(2, _load_timed, root, True):
        assert step == 10
        assert seconds < 20
    assert sorted(path.name for path in root.iterdir()) == ["bad-step-00000020-missing", "step-00000010"]


def test_a_folder_that_another_host_has_just_made_is_used(root: Path) -> None:
    """``mkdir`` says that it exists, and only then a lookup does not find it."""
    folder = see(root, "other", harsh=True)
    make_directories(root / "run" / "checkpoints")
    folder.uninstall()
    folder = see(root, "own", harsh=True)
    try:
        make_directories(root / "run" / "checkpoints")
        assert (root / "run" / "checkpoints").is_dir()
    finally:
        folder.uninstall()


# -- the lease ---------------------------------------------------------------------------------------------------------


def _hold_lease(rank: int, world: int, root: Path, harsh: bool) -> str:
    """Holds the lease, in which rank 1 fails as long as rank 0 has it."""
    comm = connect(torch.device("cpu"))
    see(root, f"host-{rank}", harsh=harsh)
    timing = LeaseTiming(heartbeat_s=0.1, limit_s=20.0, poll_s=0.05)
    if rank == 0:
        with hold(root, timing):
            comm.barrier()
            comm.barrier()  # rank 1 was refused
        comm.barrier()
        return "held"
    comm.barrier()
    try:
        with hold(root, timing):
            outcome = "held"
    except CheckpointError as error:
        outcome = str(error)
    comm.barrier()
    comm.barrier()
    with hold(root, timing) as own:
        own.check()
    return outcome


@pytest.mark.parametrize("harsh", [True, pytest.param(False, marks=EXHAUSTIVE)])
def test_a_job_of_another_host_is_refused_and_later_takes_over(root: Path, harsh: bool) -> None:
    first, second = on_hosts(2, _hold_lease, root, harsh)
    assert first == "held"
    assert "is in use by process" in second
    assert list(root.iterdir()) == []


# -- whole runs --------------------------------------------------------------------------------------------------------


def _train_slowly(rank: int, world: int, config: RunConfig, log: Path, seconds: float) -> int:
    """Trains with a disk that needs ``seconds`` for each block on rank 1, and for each read of it."""
    write, read = storage.write, integrity.read_into

    def slow_write(*arguments: Any) -> None:
        time.sleep(seconds if rank else 0)
        write(*arguments)

    def slow_read(*arguments: Any) -> None:
        time.sleep(seconds if rank else 0)
        read(*arguments)

    storage.write, integrity.read_into = slow_write, slow_read  # type: ignore[assignment]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), 2)
    return run_training(config)


@EXHAUSTIVE
def test_a_slow_save_or_load_is_no_hang(root: Path, tmp_path: Path) -> None:
    """Both take several times the limit of the supervision, with a part of the file in each of its seconds."""
    samples = write_samples(tmp_path)
    log = tmp_path / "log"
    for steps, seconds in ((2, 0.0), (3, 0.1)):  # the second run loads and saves
        config = _config(root, samples, f"train.steps={steps}")
        config = replace(config, supervise=SuperviseConfig(limit_s=30.0, save_s=1.0))
        began = time.monotonic()
        assert on_hosts(2, _train_slowly, config, log, seconds) == [0, 0], log.read_text()
    assert time.monotonic() - began > 4


def _train_on_hosts(
    rank: int, world: int, config: RunConfig, shared: dict[str, Any], hosts: str, log: Path, env: dict[str, str]
) -> int:
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE="1", **env)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), 2)
    see(host=hosts[rank], **shared)
    try:
        return run_training(config)
    except DtrainError as error:
        os.write(2, f"rank {rank}: {error}\n".encode())
        return error.exit_code


def _config(root: Path, *overrides: str) -> RunConfig:
    config = compose([*SMALL, *overrides])
    return replace(config, run_dir=str(root / "run"), supervise=SuperviseConfig(limit_s=60.0, restarts=3))


def train_on_hosts(hosts: str, config: RunConfig, log: Path, env: dict[str, str] | None = None, **shared: Any) -> str:
    """Trains with a rank on each host; returns what they printed."""
    codes = on_hosts(len(hosts), _train_on_hosts, config, shared, hosts, log, env or {})
    assert codes == [0] * len(hosts), log.read_text()
    return log.read_text()


def test_a_run_moves_to_other_hosts_at_once(root: Path, tmp_path: Path) -> None:
    """The second job begins where the first one ended, on hosts that do not see its last changes."""
    samples, constant = write_samples(tmp_path), ("schedule=constant",)
    for hosts, steps in (("ab", 4), ("cd", 6)):
        config = _config(root, samples, f"train.steps={steps}", "train.save_every=2", *constant)
        printed = train_on_hosts(hosts, config, tmp_path / "log", root=root, stale_s=5.0)
    assert "step-00000004 (saved" in printed
    assert summary(root / "run")["steps"] == 6
    assert train(tmp_path / "other", *SMALL, samples, "train.steps=6", *constant, world=2) == [0, 0]
    assert losses(root / "run") == losses(tmp_path / "other")


@EXHAUSTIVE
def test_restarts_on_other_hosts_are_counted(root: Path, tmp_path: Path) -> None:
    """P13: the count of a host is read by the next one, which does not see the file yet."""
    config = _config(root, write_samples(tmp_path), "train.steps=4")
    config = replace(config, supervise=SuperviseConfig(limit_s=60.0, restarts=1))
    log, broken = tmp_path / "log", Mishap("forward", 1, "raise").env()
    for host in "ab":
        with pytest.raises(RankFailure, match="the model broke"):
            train_on_hosts(host, config, log, broken, root=root, stale_s=30.0)
    with pytest.raises(AssertionError, match="2 attempts in a row failed without a checkpoint newer than step 0"):
        train_on_hosts("a", config, log, broken, root=root, stale_s=30.0)
