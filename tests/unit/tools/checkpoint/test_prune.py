"""``dtrain checkpoint prune``: what it deletes and keeps, and when it deletes nothing."""

from __future__ import annotations

import os
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from dtrain.checkpoint import NoCheckpointError, Retention, Snapshot, save
from dtrain.checkpoint.lease import lease
from dtrain.errors import CheckpointError
from dtrain.tools.checkpoint.cli import _size, main
from dtrain.tools.checkpoint.prune import prune
from tests.helpers.checkpoints import ALONE, make_tensors, shards_of
from tests.helpers.damage import R0, flip
from tests.helpers.ranks import fork

LOSSES = {100: 3.0, 200: 1.0, 300: 2.0, 400: None, 500: 2.5}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step, loss in LOSSES.items():
        state = {} if loss is None else {"metrics": {"val_loss": loss}}
        snapshot = Snapshot(step, shards_of(make_tensors(step), 0, 1), state)
        save(tmp_path / "checkpoints", snapshot, ALONE, retention=Retention(keep_last=99))
    return tmp_path


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (["--keep-last", "1"], [500]),
        ([], [400, 500]),
        (["--keep-every", "200"], [200, 400, 500]),
        (["--keep-last", "1", "--keep-best", "2"], [200, 300, 500]),
        (["--keep-last", "5"], [100, 200, 300, 400, 500]),
    ],
)
def test_deletes_what_no_rule_keeps(
    rules: list[str], kept: list[int], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = [step for step in LOSSES if step not in kept]
    assert main(["prune", str(run), "--dry-run", *rules]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[: len(gone)]] == [f"step-{step:08d}" for step in gone]
    assert lines[-1].startswith("would free ")
    assert steps(run) == list(LOSSES)
    folders = [run / "checkpoints" / f"step-{step:08d}" for step in gone]
    size = sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))
    assert main(["prune", str(run / "checkpoints"), *rules]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [
        *(["deleted", f"step-{step:08d}"] for step in gone),
        *(["kept", f"step-{step:08d}"] for step in kept),
    ]
    assert lines[-1] == f"freed {_size(size)}"
    assert steps(run) == kept
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [f"step-{step:08d}" for step in kept]


def test_nothing_is_deleted_if_a_kept_checkpoint_is_damaged(run: Path) -> None:
    flip(R0, 1.0)(run / "checkpoints" / "step-00000500")
    with pytest.raises(CheckpointError, match=r"nothing was deleted: .*step-00000500, which would stay, does not"):
        prune(run, Retention(keep_last=1))
    assert steps(run) == list(LOSSES)


def test_damaged_checkpoints_are_neither_counted_nor_deleted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step-00000500" / "r0000.safetensors").unlink()
    assert main(["prune", str(run), "--keep-last", "1"]) == 0
    assert steps(run) == [400, 500]
    kept = "kept step-00000500, which is BAD: r0000.safetensors: missing"
    assert kept in capsys.readouterr().out


def hold_lease(directory: str, pipe: Connection) -> None:
    with lease.hold(Path(directory), lease.LeaseTiming(heartbeat_s=0.05)):
        pipe.send(os.getpid())
        pipe.recv()


@pytest.mark.processes
def test_a_run_that_holds_the_lease_is_not_pruned(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lease, "TIMING", lease.LeaseTiming(poll_s=0.02))
    ours, theirs = Pipe()
    holder = fork(hold_lease, str(run / "checkpoints"), theirs)
    pid = ours.recv()
    assert main(["prune", str(run), "--keep-last", "1"]) == 2
    assert f"is in use by process {pid} on " in capsys.readouterr().err
    assert steps(run) == list(LOSSES)
    assert main(["prune", str(run), "--keep-last", "1", "--dry-run"]) == 0
    ours.send("end")
    holder.join()
    assert main(["prune", str(run), "--keep-last", "1"]) == 0
    assert steps(run) == [500]


def test_a_save_of_this_process_is_waited_for(run: Path) -> None:
    directory, done = run / "checkpoints", threading.Event()

    def work() -> None:
        prune(run, Retention(keep_last=1))
        done.set()

    pruning = threading.Thread(target=work)
    with lease.hold(directory) as held:  # as a run does
        with held.save_lock:  # a save is under way
            pruning.start()
            assert not done.wait(0.3)
            assert steps(run) == list(LOSSES)
        pruning.join()
    assert steps(run) == [500]


def test_mistakes_are_named_and_change_nothing(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is one checkpoint; give the run directory"):
        prune(run / "checkpoints" / "step-00000100", Retention())
    with pytest.raises(CheckpointError, match="keep_last=0 would keep no checkpoint"):
        prune(run, Retention(keep_last=0))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(NoCheckpointError, match="there is no checkpoint in"):
        prune(empty, Retention())
    assert list(empty.iterdir()) == []
    assert steps(run) == list(LOSSES)
