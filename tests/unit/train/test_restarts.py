"""The number of restarts without a newer checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtrain.config.schema import RunConfig, SuperviseConfig, TrainConfig
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.errors import CheckpointError, ConfigError, RestartError
from dtrain.telemetry.metrics import RESTARTS_FILE
from dtrain.train.restarts import Attempts, counted_attempt
from dtrain.train.run_dir import RunDir


def attempt(folder: Path, error: BaseException | None = None, config: RunConfig | None = None) -> None:
    """One attempt, which ends by ``error`` or well."""
    run_dir = RunDir(folder, None, finished=False)
    with counted_attempt(config or RunConfig(), SingleRank(torch.device("cpu")), run_dir):
        if error is not None:
            raise error


def fail(folder: Path, times: int = 1, config: RunConfig | None = None) -> None:
    for _ in range(times):
        with pytest.raises(ZeroDivisionError):
            attempt(folder, ZeroDivisionError("of the model\nand more"), config)


def commit(folder: Path, step: int) -> None:
    (folder / f"checkpoints/step-{step:08d}").mkdir(parents=True)


def test_the_fourth_restart_is_refused(tmp_path: Path) -> None:
    commit(tmp_path, 8)
    fail(tmp_path, 4)
    for _ in range(2):  # and stays so
        with pytest.raises(RestartError) as refused:
            attempt(tmp_path)
        assert str(refused.value) == (
            f"{tmp_path} is not started again: 4 attempts in a row failed without a checkpoint newer than step 8 "
            "(supervise.restarts=3); the last failure: ZeroDivisionError: of the model; mend the cause and remove "
            "restarts.json there, change the configuration, or raise supervise.restarts (0: no limit)"
        )
        assert refused.value.exit_code == 1
    (tmp_path / RESTARTS_FILE).unlink()
    attempt(tmp_path)


def test_what_starts_the_count_again(tmp_path: Path) -> None:
    fail(tmp_path, 4)
    fail(tmp_path, 4, RunConfig(train=TrainConfig(steps=7)))
    fail(tmp_path, 4, RunConfig())
    commit(tmp_path, 2)
    fail(tmp_path, 4)
    commit(tmp_path, 4)
    fail(tmp_path, 3)
    attempt(tmp_path)  # ends well, or is stopped by a signal after saving
    assert not (tmp_path / RESTARTS_FILE).exists()
    fail(tmp_path, 4)
    (tmp_path / "checkpoints/step-00000004").rmdir()  # set aside as damaged: no progress
    with pytest.raises(RestartError):
        attempt(tmp_path)
    more = replace(RunConfig(), supervise=SuperviseConfig(restarts=4), resume="none", run_dir="elsewhere")
    fail(tmp_path, 1, more)
    with pytest.raises(RestartError, match="5 attempts"):
        attempt(tmp_path, config=more)
    attempt(tmp_path, config=RunConfig(supervise=SuperviseConfig(restarts=0)))


def test_a_refused_configuration_is_no_attempt(tmp_path: Path) -> None:
    for _ in range(9):
        with pytest.raises(ConfigError):
            attempt(tmp_path, ConfigError("no such file"))
    assert not (tmp_path / RESTARTS_FILE).exists()
    fail(tmp_path, 4)
    for _ in range(2):
        with pytest.raises(RestartError):
            attempt(tmp_path, ConfigError("no such file"))


def test_a_damaged_file_counts_nothing(tmp_path: Path) -> None:
    """But a count that cannot be written ends the start."""
    for text in ("{", "[1]", '{"step": 0}', '{"step": "0", "attempts": 9, "config": "", "hangs": 0, "failure": ""}'):
        (tmp_path / RESTARTS_FILE).write_text(text)
        assert Attempts.read(tmp_path / RESTARTS_FILE) is None
    fail(tmp_path, 4)
    (tmp_path / f"{RESTARTS_FILE}.tmp").mkdir()
    with pytest.raises(ConfigError, match=f"Is a directory .*: {tmp_path}/restarts.json"):
        attempt(tmp_path, config=RunConfig(train=TrainConfig(steps=7)))


def test_the_last_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(tmp_path, 4)
    (tmp_path / "failures/hang-1").mkdir(parents=True)  # of the last attempt: its stacks say more
    with pytest.raises(RestartError, match=f"the last failure: it hung, see {tmp_path}/failures/hang-1;"):
        attempt(tmp_path)
    (tmp_path / RESTARTS_FILE).unlink()
    fail(tmp_path, 3)
    with pytest.raises(CheckpointError):
        attempt(tmp_path, CheckpointError("no disk"))
    with pytest.raises(RestartError, match="the last failure: no disk;"):
        attempt(tmp_path)
    killed = Attempts.read(tmp_path / RESTARTS_FILE)
    assert killed is not None
    replace(killed, failure="").write(tmp_path / RESTARTS_FILE)
    with pytest.raises(RestartError, match="the last failure: it ended without a message, such as by SIGKILL;"):
        attempt(tmp_path)
    (tmp_path / RESTARTS_FILE).unlink()
    monkeypatch.setenv("MY_TOKEN", "c4nary-environment")
    with pytest.raises(CheckpointError):
        attempt(tmp_path, CheckpointError(f"{'.' * 485} c4nary-environment"))  # cut in two
    stored = (tmp_path / RESTARTS_FILE).read_text()
    assert ("***" in stored, "c4nary" in stored) == (True, False)
