"""Ranks and jobs of two hosts over a shared folder that is slow and caches names, as NFS may."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from dtrain.checkpoint import Snapshot, open_newest, save, shared_folder, verify
from dtrain.checkpoint.directory import make_directories
from dtrain.checkpoint.lease.lease import LeaseTiming, hold
from dtrain.checkpoint.retention import Retention
from dtrain.cli.resolve import compose
from dtrain.config.schema import RunConfig, SuperviseConfig
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.setup import connect
from dtrain.errors import CheckpointError
from dtrain.train.run import run_training
from tests.helpers.caching_folder import CachingFolder
from tests.helpers.checkpoints import make_tensors, save_good, shards_of
from tests.helpers.launch import SMALL, losses, summary, train, write_samples
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

on_hosts = partial(run_ranks, fresh=True, timeout=120)  # because they replace functions of the system
STALE_S = 0.5


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


def see(root: Path, host: str, *, stale_s: float = STALE_S, harsh: bool = True) -> CachingFolder:
    folder = CachingFolder(root, root.with_name("journal"), host, stale_s, harsh=harsh)
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


def _save_and_load(rank: int, world: int, root: Path) -> tuple[list[str], int]:
    comm = connect(torch.device("cpu"))
    see(root, f"host-{rank}")
    directory = root / "run" / "checkpoints"
    names = [save_step(comm, directory, step) for step in (10, 20, 30)]
    return names, load_step(comm, directory)


def test_ranks_of_two_hosts_save_and_load(root: Path) -> None:
    names = ["step-00000010", "step-00000020", "step-00000030"]
    assert on_hosts(2, _save_and_load, root) == [(names, 30)] * 2
    assert sorted(path.name for path in (root / "run" / "checkpoints").iterdir()) == names[1:]
    assert verify(root / "run").ok


def _save_then_lose_sight(rank: int, world: int, root: Path, verb: str) -> str:
    comm = connect(torch.device("cpu"))
    save_step(comm, root, 10)
    save_step(comm, root, 20)
    shared_folder.LIMIT_S = 0.5
    see(root, f"host-{rank}", stale_s=60)
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


def _load_timed(rank: int, world: int, root: Path) -> tuple[int, float]:
    comm = connect(torch.device("cpu"))
    see(root, f"host-{rank}")
    began = time.monotonic()
    return load_step(comm, root), time.monotonic() - began


def test_a_file_that_is_gone_on_all_hosts_is_refused_at_once(root: Path) -> None:
    for step in (10, 20):
        save_good(root, step)
    (root / "step-00000020" / "r0001.safetensors").unlink()  # of the share of rank 1
    for step, seconds in on_hosts(2, _load_timed, root):
        assert step == 10
        assert seconds < 20
    assert sorted(path.name for path in root.iterdir()) == ["bad-step-00000020-missing", "step-00000010"]


def test_a_folder_that_another_host_has_just_made_is_used(root: Path) -> None:
    """``mkdir`` says that it exists, and only then a lookup does not find it."""
    for host in ("other", "own"):
        folder = see(root, host)
        try:
            make_directories(root / "run" / "checkpoints")
            assert (root / "run" / "checkpoints").is_dir()
        finally:
            folder.uninstall()


# -- the lease ---------------------------------------------------------------------------------------------------------


def _hold_lease(rank: int, world: int, root: Path) -> str:
    """Holds the lease, in which rank 1 fails as long as rank 0 has it."""
    comm = connect(torch.device("cpu"))
    see(root, f"host-{rank}")
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


def test_a_job_of_another_host_is_refused_and_later_takes_over(root: Path) -> None:
    first, second = on_hosts(2, _hold_lease, root)
    assert first == "held"
    assert "is in use by process" in second
    assert list(root.iterdir()) == []


# -- whole runs --------------------------------------------------------------------------------------------------------


def _train_on_hosts(rank: int, world: int, config: RunConfig, root: Path, hosts: str, log: Path) -> int:
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE="1")
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), 2)
    see(root, hosts[rank], stale_s=5.0, harsh=False)
    return run_training(config)


def test_a_run_moves_to_other_hosts_at_once(root: Path, tmp_path: Path) -> None:
    """The second job begins where the first one ended, on hosts that do not see its last changes."""
    common, log = (*SMALL, write_samples(tmp_path), "schedule=constant"), tmp_path / "log"
    for hosts, steps in (("ab", 4), ("cd", 6)):
        config = compose([*common, f"train.steps={steps}", "train.save_every=2", f"run_dir={root}/run"])
        config = replace(config, supervise=SuperviseConfig(limit_s=60.0, restarts=3))
        assert on_hosts(2, _train_on_hosts, config, root, hosts, log) == [0, 0], log.read_text()
    assert "step-00000004 (saved" in log.read_text()
    assert summary(root / "run")["steps"] == 6
    assert train(tmp_path / "other", *common, "train.steps=6", world=2) == [0, 0]
    assert losses(root / "run") == losses(tmp_path / "other")
