from __future__ import annotations

import os
import re
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import NoCheckpointError, Retention, Snapshot, inspection, list_checkpoints, save, verify
from dtrain.checkpoint.directory import delete_checkpoint
from dtrain.checkpoint.format.manifest import Manifest
from dtrain.checkpoint.lease import lease
from dtrain.errors import CheckpointError
from dtrain.tools.checkpoint.cli import _size, main
from dtrain.tools.checkpoint.prune import prune
from tests.helpers.checkpoints import ALONE, make_tensors, save_good, shards_of
from tests.helpers.damage import R0, R1, flip
from tests.helpers.ranks import fork


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_good(tmp_path / "checkpoints", 100, 2)
    save_good(tmp_path / "checkpoints", 200, 3)
    return tmp_path


def test_verify_names_the_bad_file_and_renames_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run / "checkpoints"
    lines = ["ok  step-00000100  1.8 kB  2 files", "ok  step-00000200  2.3 kB  3 files"]
    for path, expected in ((run, lines), (directory, lines), (directory / "step-00000200", lines[1:])):
        assert main(["verify", str(path)]) == 0
        assert capsys.readouterr().out.splitlines() == expected
    flip(R1, 1.0)(directory / "step-00000200")
    assert main(["verify", str(run)]) == 1
    good, bad = capsys.readouterr().out.splitlines()
    assert good == lines[0]
    assert re.match(r"BAD step-00000200 r0001.safetensors: (blake3|sha256) differs \(expected ", bad)
    assert sorted(p.name for p in directory.iterdir()) == ["step-00000100", "step-00000200"]
    assert main(["verify", "--fast", str(run)]) == 0  # sizes and headers are as they were
    assert capsys.readouterr().out.splitlines() == lines
    assert not verify(run).ok


def test_list_shows_each_checkpoint_and_the_quarantined_ones(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("step-00000300", "bad-step-00000050-hash", "step-00000400.tmp-ab12cd34"):
        (run / "checkpoints" / name).mkdir()
    assert main(["list", str(run)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    columns = ["name", "step", "saved", "size", "files", "world", "size", "engine", "train", "loss", "val", "loss"]
    assert head.split() == [*columns, "status"]
    assert rows[0].split()[:2] == ["step-00000100", "100"]
    assert rows[0].split()[3:] == ["1.8", "kB", "2", "2", "?", "-", "-", "ok"]
    assert rows[2].split(maxsplit=9) == ["step-00000300", *"??????", "-", "-", "BAD manifest.json: missing"]
    assert rows[3:] == ["quarantined: bad-step-00000050-hash"]


def test_list_shows_losses_engine_and_who_holds_the_lease(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, state in (
        (300, {"engine": "fsdp2", "metrics": {"train_loss": 1.25, "val_loss": 2.0}}),
        (400, {"engine": 5, "metrics": {"train_loss": "low", "val_loss": None}}),
    ):
        save(tmp_path, Snapshot(step, (), state), ALONE, retention=Retention(keep_last=99))
    with lease.hold(tmp_path):
        assert main(["list", str(tmp_path)]) == 0
        row, strange, holder = capsys.readouterr().out.splitlines()[1:]
        assert main(["list", str(tmp_path / "step-00000300")]) == 0
        assert "lease" not in capsys.readouterr().out
    assert row.split()[-4:] == ["fsdp2", "1.2500", "2.0000", "ok"]
    assert strange.split()[-4:] == ["?", "-", "-", "ok"]
    assert holder.startswith(f"lease: process {os.getpid()} on ")
    assert main(["list", str(tmp_path)]) == 0
    assert "lease" not in capsys.readouterr().out


def test_what_holds_no_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"dtrain: there is no checkpoint in {tmp_path}\n"
    assert list_checkpoints(tmp_path) == []
    with pytest.raises(NoCheckpointError):
        verify(tmp_path)
    for words in ("verify PATH", "list PATH", "prune PATH", "export PATH out", "diff PATH b"):
        assert main(words.replace("PATH", "/no/such/path").split()) == 2
        output = capsys.readouterr()
        assert output.err.startswith("dtrain: /no/such/path does not exist; give a run directory")
        assert (output.out, output.err.count("\n")) == ("", 1)
    unfinished = tmp_path / "step-00000100.tmp-ab12cd34"
    unfinished.mkdir()
    with pytest.raises(CheckpointError, match="a save that never finished"):
        verify(unfinished)


@pytest.mark.parametrize(
    "words",
    ["", "verify", "forget x", "verify --quick a", "prune x --keep-last few", "export x y --dtype fp8", "diff x"],
)
def test_bad_usage_exits_2_with_the_usage(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr().err.startswith("usage: dtrain checkpoint")


def test_a_checkpoint_deleted_while_it_is_read_is_not_damaged(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = inspection.load_manifest

    def load_manifest(path: Path) -> Manifest:
        if path.name == "step-00000100":
            delete_checkpoint(path)
        return real(path)

    monkeypatch.setattr(inspection, "load_manifest", load_manifest)
    assert [item.path.name for item in verify(run).checkpoints] == ["step-00000200"]
    assert verify(run).ok


def test_late_file_system_error_is_one_clear_line(run: Path, monkeypatch: Any, capsys: Any) -> None:
    def fail(path: Path) -> None:
        raise PermissionError(13, "Permission denied", "/closed")

    monkeypatch.setattr("dtrain.checkpoint.directory.quarantined_checkpoints", fail)
    assert main(["list", str(run)]) == 2
    assert capsys.readouterr().err == "dtrain: Permission denied (errno 13): /closed\n"


LOSSES = {100: 3.0, 200: 1.0, 300: 2.0, 400: None, 500: 2.5}


@pytest.fixture
def five(tmp_path: Path) -> Path:
    for step, loss in LOSSES.items():
        state = {} if loss is None else {"metrics": {"val_loss": loss}}
        snapshot = Snapshot(step, shards_of(make_tensors(step), 0, 1), state)
        save(tmp_path / "checkpoints", snapshot, ALONE, retention=Retention(keep_last=99))
    return tmp_path


def steps(five: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (five / "checkpoints").glob("step-*"))


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
def test_deletes_what_no_rule_keeps(rules: list[str], kept: list[int], five: Path, capsys: Any) -> None:
    gone = [step for step in LOSSES if step not in kept]
    assert main(["prune", str(five), "--dry-run", *rules]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[: len(gone)]] == [f"step-{step:08d}" for step in gone]
    assert lines[-1].startswith("would free ")
    assert steps(five) == list(LOSSES)
    folders = [five / "checkpoints" / f"step-{step:08d}" for step in gone]
    size = sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))
    assert main(["prune", str(five / "checkpoints"), *rules]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [
        *(["deleted", f"step-{step:08d}"] for step in gone),
        *(["kept", f"step-{step:08d}"] for step in kept),
    ]
    assert lines[-1] == f"freed {_size(size)}"
    assert steps(five) == kept
    assert sorted(path.name for path in (five / "checkpoints").iterdir()) == [f"step-{step:08d}" for step in kept]


def test_nothing_is_deleted_if_a_kept_checkpoint_is_damaged(five: Path) -> None:
    flip(R0, 1.0)(five / "checkpoints" / "step-00000500")
    with pytest.raises(CheckpointError, match=r"nothing was deleted: .*step-00000500, which would stay, does not"):
        prune(five, Retention(keep_last=1))
    assert steps(five) == list(LOSSES)


def test_damaged_checkpoints_are_neither_counted_nor_deleted(five: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (five / "checkpoints" / "step-00000500" / "r0000.safetensors").unlink()
    assert main(["prune", str(five), "--keep-last", "1"]) == 0
    assert steps(five) == [400, 500]
    kept = "kept step-00000500, which is BAD: r0000.safetensors: missing"
    assert kept in capsys.readouterr().out


def hold_lease(directory: str, pipe: Connection) -> None:
    with lease.hold(Path(directory), lease.LeaseTiming(heartbeat_s=0.05)):
        pipe.send(os.getpid())
        pipe.recv()


@pytest.mark.processes
def test_a_run_that_holds_the_lease_is_not_pruned(five: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(lease, "TIMING", lease.LeaseTiming(poll_s=0.02))
    ours, theirs = Pipe()
    holder = fork(hold_lease, str(five / "checkpoints"), theirs)
    pid = ours.recv()
    assert main(["prune", str(five), "--keep-last", "1"]) == 2
    assert f"is in use by process {pid} on " in capsys.readouterr().err
    assert steps(five) == list(LOSSES)
    assert main(["prune", str(five), "--keep-last", "1", "--dry-run"]) == 0
    ours.send("end")
    holder.join()
    assert main(["prune", str(five), "--keep-last", "1"]) == 0
    assert steps(five) == [500]


def test_a_save_of_this_process_is_waited_for(five: Path) -> None:
    directory, done = five / "checkpoints", threading.Event()

    def work() -> None:
        prune(five, Retention(keep_last=1))
        done.set()

    pruning = threading.Thread(target=work)
    with lease.hold(directory) as held:  # as a run does
        with held.save_lock:  # a save is under way
            pruning.start()
            assert not done.wait(0.3)
            assert steps(five) == list(LOSSES)
        pruning.join()
    assert steps(five) == [500]


def test_mistakes_are_named_and_change_nothing(five: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is one checkpoint; give the run directory"):
        prune(five / "checkpoints" / "step-00000100", Retention())
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(NoCheckpointError, match="there is no checkpoint in"):
        prune(empty, Retention())
    assert list(empty.iterdir()) == []
    assert steps(five) == list(LOSSES)
