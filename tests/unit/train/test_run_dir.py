"""The choice of the run directory, and whether the run in it may continue."""

from __future__ import annotations

import logging
import os
import threading
import time
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
from dtrain.distributed.setup import make_communicator
from dtrain.distributed.single_rank import SingleRank
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


def test_a_name_is_chosen_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (opened(RunConfig()).path for _ in range(2))
    assert first != second
    assert {first.parent, second.parent} == {tmp_path / "runs"}


def test_each_job_of_a_sweep_has_its_folder(tmp_path: Path) -> None:
    config = RunConfig(run_dir=str(tmp_path / "sweep"))
    assert opened(config, job=3).path == tmp_path / "sweep" / "3"


def test_auto_continues_from_the_runs_own_checkpoints(tmp_path: Path) -> None:
    config = RunConfig(run_dir=str(tmp_path))
    assert opened(config) == RunDir(tmp_path, None, False)
    _checkpoint(tmp_path, 100)
    assert opened(config) == RunDir(tmp_path, tmp_path / "checkpoints", False)


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


def test_none_never_overwrites(tmp_path: Path) -> None:
    config = RunConfig(run_dir=str(tmp_path), resume="none")
    assert opened(config).load_from is None
    _checkpoint(tmp_path, 7)
    with pytest.raises(ConfigError, match=r"already holds checkpoints up to step 7; continue it with resume=auto"):
        opened(config)


def test_a_path_is_a_checkpoint_a_directory_of_them_or_a_run(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path / "old", 5)
    found = []
    for resume in (path, path.parent, tmp_path / "old"):
        config = RunConfig(run_dir=str(tmp_path / "new"), resume=str(resume))
        check_resume(config)
        found.append(opened(config).load_from)
    assert found == [path, path.parent, path.parent]


def test_a_missing_path_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory; expected auto, none, a checkpoint"):
        check_resume(RunConfig(resume=str(tmp_path / "nix")))
    with pytest.raises(ConfigError, match="it holds no step-<number>"):
        check_resume(RunConfig(resume=str(tmp_path)))
    check_resume(RunConfig(resume="none"))


def test_a_branch_with_later_checkpoints_is_refused(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 10)
    run_dir = RunDir(tmp_path, tmp_path / "checkpoints" / "step-00000005", False)
    check_not_newer(run_dir, 10)
    with pytest.raises(ConfigError, match=r"step 5, .* step 10; use resume=auto"):
        check_not_newer(run_dir, 5)


def test_an_unreadable_newest_checkpoint_is_named(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 10)
    run_dir = RunDir(tmp_path, tmp_path / "checkpoints", False)
    check_not_newer(run_dir, 10)
    with pytest.raises(
        ConfigError, match=r"^\S+/checkpoints/step-00000010 cannot be read.* at step 5; make it"
    ) as caught:
        check_not_newer(run_dir, 5)
    assert "resume=auto" not in str(caught.value)


@pytest.mark.parametrize("resume", ["auto", "none"])
def test_a_run_whose_checkpoints_were_all_set_aside_does_not_restart(tmp_path: Path, resume: str) -> None:
    (tmp_path / "checkpoints" / "bad-step-00000100-hash").mkdir(parents=True)
    config = RunConfig(run_dir=str(tmp_path), resume=resume)
    if resume == "auto":  # the engine reports that none verifies
        assert opened(config) == RunDir(tmp_path, tmp_path / "checkpoints", False)
    else:
        with pytest.raises(ConfigError, match="already holds bad-step-00000100-hash"):
            opened(config)


def test_resume_from_an_unfinished_save_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step-00000300.tmp-1f0c9a2b"
    path.mkdir()
    with pytest.raises(ConfigError, match=r"resume=.*tmp-1f0c9a2b: .* never finished"):
        check_resume(RunConfig(resume=str(path)))


def test_another_model_is_refused_and_other_changes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    before = redacted(RunConfig())
    now = RunConfig(
        run_dir="x", train=TrainConfig(steps=300), model=ModelConfig(dropout=0.1), launch=LaunchConfig(device="cpu")
    )
    with caplog.at_level(logging.INFO):
        compare_configs(before, redacted(now), 7)
    assert [record.getMessage() for record in caplog.records] == [
        "changed since the checkpoint at step 7: train.steps=300 (was 200)",
        "changed since the checkpoint at step 7: model.dropout=0.1 (was 0.0)",
    ]
    with pytest.raises(ConfigError, match=r"holds another model: model.hidden_dim=256 \(now 512\)"):
        compare_configs(before, redacted(RunConfig(model=ModelConfig(hidden_dim=512))), 7)


def test_the_folder_of_a_model_may_move(caplog: pytest.LogCaptureFixture) -> None:
    before, now = (
        redacted(RunConfig(model=ModelConfig(factory=HF_FACTORY, path=path), launch=LaunchConfig(device="cpu")))
        for path in ("/old/llama", "/new/llama")
    )
    with caplog.at_level(logging.INFO):
        compare_configs(before, now, 7)
    assert caplog.messages == ["changed since the checkpoint at step 7: model.path=/new/llama (was /old/llama)"]


def test_the_loss_is_not_part_of_the_model(caplog: pytest.LogCaptureFixture) -> None:
    """Neither for a checkpoint from before its keys."""
    before = redacted(RunConfig())
    before["model"] = {key: value for key, value in before["model"].items() if key not in LOSS_KEYS}
    compare_configs(before, redacted(RunConfig()), 7)
    with caplog.at_level(logging.INFO):
        compare_configs(redacted(RunConfig()), redacted(RunConfig(model=ModelConfig(loss_chunk="auto"))), 7)
    assert caplog.messages == ["changed since the checkpoint at step 7: model.loss_chunk=auto (was none)"]


def test_another_vocabulary_is_another_model() -> None:
    now = redacted(RunConfig(model=ModelConfig(vocab_size=300)))
    with pytest.raises(ConfigError, match=r"holds another model: model.vocab_size=257 \(now 300\)"):
        compare_configs(redacted(RunConfig(model=ModelConfig(vocab_size=257))), now, 7)
    unnamed = redacted(RunConfig())
    del unnamed["model"]["vocab_size"]
    compare_configs(unnamed, now, 7)


def test_config_and_the_previous_config_are_kept(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, None, False)
    config = RunConfig(
        tracker=WandbConfig(), model=ModelConfig(factory="mine:build", args={"api_key": "canary", "depth": 3})
    )
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


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir=.*file/run cannot be created"):
        opened(RunConfig(run_dir=str(tmp_path / "file" / "run")))


def _open_with_short_collectives(rank: int, world: int, folder: str, timing: lease.LeaseTiming) -> tuple[float, str]:
    """Opens a run directory with collectives that time out after 2.5 s."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2.5))
    lease.TIMING = timing
    Path(f"{folder}.started").touch()
    started = time.monotonic()
    try:
        found = str(opened(RunConfig(run_dir=folder), make_communicator(group, torch.device("cpu"))).load_from)
    except ConfigError as error:
        found = str(error)
    return time.monotonic() - started, found


def _write_lease_of_another_host(run_dir: Path) -> Path:
    (run_dir / "checkpoints").mkdir(parents=True)
    path = path_of(run_dir / "checkpoints", 1)
    path.write_bytes(replace(Holder.this_process(1), host="elsewhere", boot_id="other").encode())
    return path


@pytest.mark.processes
def test_a_stale_lease_is_waited_for_longer_than_a_collective_may_take(tmp_path: Path) -> None:
    _write_lease_of_another_host(tmp_path)
    timing = lease.LeaseTiming(limit_s=3.5, poll_s=0.1)
    for seconds, found in run_ranks(2, _open_with_short_collectives, str(tmp_path), timing):
        assert found == "None"
        assert seconds > 3.4


@pytest.mark.processes
def test_all_ranks_see_that_a_lease_is_held_after_waiting(tmp_path: Path) -> None:
    path = _write_lease_of_another_host(tmp_path)
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
    for _, found in results:
        assert f"run_dir={tmp_path} is not free: {tmp_path}/checkpoints is in use by process " in found
