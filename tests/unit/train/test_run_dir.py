"""The choice of the run directory, and whether the run in it may continue."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

from dtrain.checkpoint import Snapshot, save
from dtrain.checkpoint.lease import lease
from dtrain.checkpoint.lease.lease_file import Holder, path_of
from dtrain.config.model import HF_FACTORY, LOSS_KEYS, ModelConfig
from dtrain.config.schema import LaunchConfig, RunConfig, TrainConfig, WandbConfig
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.transport.choose import make_communicator
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.errors import CommunicationError, ConfigError
from dtrain.telemetry.metrics import write_summary
from dtrain.train.run_dir import (
    RunDir,
    check_not_newer,
    check_resume,
    compare_configs,
    decide_on_rank_0,
    open_run_dir,
    redacted,
    write_config,
)
from tests.helpers.damage import MANIFEST, flip
from tests.helpers.ranks import run_ranks
from tests.unit.telemetry.test_metrics import SUMMARY

ALONE = SingleRank(torch.device("cpu"))


def _checkpoint(run_dir: Path, step: int) -> Path:
    path = run_dir / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    return path


def opened(config: RunConfig, comm: Communicator = ALONE, job: int | None = None) -> RunDir:
    """Opens a run directory and closes it at once."""
    with ExitStack() as held:
        return open_run_dir(config, comm, job, held)


def test_what_a_folder_is_opened_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (opened(RunConfig()).path for _ in range(2))
    assert first != second
    assert {first.parent, second.parent} == {tmp_path / "runs"}, "a name is chosen by default"
    config = RunConfig(run_dir=str(tmp_path))
    assert opened(config, job=3).path == tmp_path / "3", "each job of a sweep has its folder"
    assert opened(config) == RunDir(tmp_path, None, False)
    assert opened(replace(config, resume="none")).load_from is None
    path = _checkpoint(tmp_path, 7)
    assert opened(config) == RunDir(tmp_path, tmp_path / "checkpoints", False)
    for own in (path, path.parent, tmp_path):
        branch = RunConfig(run_dir=str(tmp_path / "new"), resume=str(own))
        check_resume(branch)
        assert opened(branch).load_from == (path if own == path else path.parent)
    check_resume(replace(config, resume="none"))
    with pytest.raises(ConfigError, match=r"already holds checkpoints up to step 7; continue it with resume=auto"):
        opened(replace(config, resume="none"))
    path.rename(path.parent / "bad-step-00000007-hash")  # as if it had been set aside: no run restarts
    assert opened(config) == RunDir(tmp_path, tmp_path / "checkpoints", False), "the engine reports that none verifies"
    with pytest.raises(ConfigError, match="already holds bad-step-00000007-hash"):
        opened(replace(config, resume="none"))


def test_impossible_folders_are_refused_before_anything_starts(tmp_path: Path) -> None:
    unfinished = tmp_path / "step-00000300.tmp-1f0c9a2b"
    unfinished.mkdir()
    (tmp_path / "file").touch()
    for folder, message in (
        (tmp_path / "nix", "no such directory; expected auto, none, a checkpoint"),
        (tmp_path, "it holds no step-<number>"),
        (unfinished, r"resume=.*tmp-1f0c9a2b: .* never finished"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_resume(RunConfig(resume=str(folder)))
    with pytest.raises(ConfigError, match=r"run_dir=.*file/run cannot be created"):
        opened(RunConfig(run_dir=str(tmp_path / "file" / "run")))


def test_a_branch_with_later_checkpoints_is_refused(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 10)
    branch = RunDir(tmp_path, tmp_path / "checkpoints" / "step-00000005", False)
    own = replace(branch, load_from=tmp_path / "checkpoints")  # at step 5, because the newest is damaged
    for run_dir, message in (
        (branch, r"step 5, .* step 10; use resume=auto"),
        (own, r"^\S+/checkpoints/step-00000010 cannot be read.* at step 5; make it((?!resume=auto).)*$"),
    ):
        check_not_newer(run_dir, 10)
        with pytest.raises(ConfigError, match=message):
            check_not_newer(run_dir, 5)


def test_the_contract_is_that_of_the_newest_readable_checkpoint(tmp_path: Path) -> None:
    """The one that is loaded when a newer one is damaged: its FP8 decisions are kept."""
    for step in (5, 10):
        state = {"contract": {"precision": "bf16", "step": step}}
        save(tmp_path / "checkpoints", Snapshot(step, (), state), ALONE)
    assert opened(RunConfig(run_dir=str(tmp_path))).contract["step"] == 10
    flip(MANIFEST, 0.5)(tmp_path / "checkpoints" / "step-00000010")
    assert opened(RunConfig(run_dir=str(tmp_path))).contract["step"] == 5


def test_a_finished_run_is_finished_until_it_gets_more_steps(tmp_path: Path) -> None:
    write_summary(tmp_path, replace(SUMMARY, steps=100))
    config = RunConfig(run_dir=str(tmp_path), train=TrainConfig(steps=100))
    assert opened(config).finished
    assert not opened(replace(config, train=TrainConfig(steps=101))).finished
    write_summary(tmp_path, replace(SUMMARY, steps=100, finished=False))
    assert not opened(config).finished


def _hf(path: str) -> RunConfig:
    return RunConfig(model=ModelConfig(factory=HF_FACTORY, path=path), launch=LaunchConfig(device="cpu"))


def test_changes_that_are_no_other_model_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    now = RunConfig(run_dir="x", train=TrainConfig(steps=300), model=ModelConfig(dropout=0.1, loss_chunk="auto"))
    smaller = replace(now, model=replace(now.model, recompute="full", offload_activations=True, blocks=["blocks.*"]))
    with caplog.at_level(logging.INFO):
        compare_configs(redacted(RunConfig()), redacted(now), 7)
        compare_configs(redacted(_hf("/old/llama")), redacted(_hf("/new/llama")), 7)
        compare_configs(redacted(now), redacted(smaller), 7)
    changes = ["train.steps=300 (was 200)", "model.dropout=0.1 (was 0.0)", "model.loss_chunk=auto (was none)"]
    changes.append("model.path=/new/llama (was /old/llama)")
    changes += ["model.recompute=full (was none)", "model.offload_activations=True (was False)"]
    changes.append("model.blocks=['blocks.*'] (was auto)")
    assert sorted(caplog.messages) == sorted(f"changed since the checkpoint at step 7: {change}" for change in changes)


def test_another_model_is_refused() -> None:
    for key, old, new in (("hidden_dim", 256, 512), ("vocab_size", 257, 300)):
        before, now = (redacted(RunConfig(model=ModelConfig(**{key: size}))) for size in (old, new))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=rf"holds another model: model.{key}={old} \(now {new}\)"):
            compare_configs(before, now, 7)
    older = redacted(RunConfig())  # a checkpoint from before these keys
    for key in ("vocab_size", *LOSS_KEYS):
        del older["model"][key]
    compare_configs(older, redacted(RunConfig(model=ModelConfig(vocab_size=300))), 7)


def test_config_and_the_previous_config_are_kept(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, None, False)
    model = ModelConfig(factory="mine:build", args={"api_key": "canary", "depth": 3})
    config = RunConfig(tracker=WandbConfig(), model=model)
    write_config(run_dir, config, 0)
    write_config(run_dir, config, 10)
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert written["train"]["steps"] == 200
    assert written["model"]["args"] == {"api_key": "***", "depth": 3}
    write_config(run_dir, replace(config, seed=4), 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config-until-step-20.yaml", "config.yaml"]
    assert yaml.safe_load((tmp_path / "config-until-step-20.yaml").read_text())["seed"] == 0


def _decide(rank: int, world: int, folder: str) -> tuple[str, str, str]:
    comm = make_communicator(dist.group.WORLD, torch.device("cpu"))
    run_dir = opened(RunConfig(run_dir=f"{folder}/run"), comm)

    def refuse() -> None:
        raise PermissionError(13, "Permission denied", "/closed")

    def break_down() -> None:
        raise KeyError("a bug")

    with pytest.raises(ConfigError) as refusal:
        decide_on_rank_0(comm, refuse)
    with pytest.raises(KeyError if rank == 0 else CommunicationError) as breakdown:
        decide_on_rank_0(comm, break_down)
    return str(run_dir.path), str(refusal.value), str(breakdown.value)


@pytest.mark.processes
def test_all_ranks_get_the_decision_or_error_of_rank_0(tmp_path: Path) -> None:
    results = run_ranks(2, _decide, str(tmp_path))
    assert results[0][:2] == results[1][:2] == (str(tmp_path / "run"), "Permission denied (errno 13): /closed")
    assert results[0][2] == "'a bug'"
    assert results[1][2] == "rank 0 failed, so this one ends too: KeyError: 'a bug'"


def _open_with_short_collectives(rank: int, world: int, folder: str, timing: lease.LeaseTiming) -> str:
    """Opens a run directory with collectives that time out after 2.5 s."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2.5))
    lease.TIMING = timing
    Path(f"{folder}.started").touch()
    with pytest.raises(ConfigError) as error:
        opened(RunConfig(run_dir=folder), make_communicator(group, torch.device("cpu")))
    return str(error.value)


@pytest.mark.processes
def test_all_ranks_see_that_a_lease_is_held_after_waiting(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    path = path_of(tmp_path / "checkpoints", 1)
    path.write_bytes(replace(Holder.this_process(1), host="elsewhere", boot_id="other").encode())
    ended = threading.Event()

    def write_heartbeats() -> None:
        """From 3 s after the ranks have started, so that they wait for longer than a collective may take."""
        holder = Holder.decode(path.read_bytes(), path.name)
        while not Path(f"{tmp_path}.started").exists() and not ended.wait(0.05):
            pass
        with path.open("r+b", buffering=0) as file:
            while not ended.wait(3.0 if holder.counter == 0 else 0.2):
                holder = holder.with_heartbeat()
                os.pwrite(file.fileno(), holder.encode(), 0)

    heartbeats = threading.Thread(target=write_heartbeats)
    heartbeats.start()
    try:
        timing = lease.LeaseTiming(limit_s=60, poll_s=0.1)
        results = run_ranks(2, _open_with_short_collectives, str(tmp_path), timing)
    finally:
        ended.set()
        heartbeats.join()
    for found in results:
        assert f"run_dir={tmp_path} is not free: {tmp_path}/checkpoints is in use by process " in found
