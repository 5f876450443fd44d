from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import NoCheckpointError, Retention, Snapshot, inspection, list_checkpoints, save, verify
from dtrain.checkpoint.directory import delete_checkpoint
from dtrain.checkpoint.format.manifest import Manifest
from dtrain.checkpoint.lease import lease
from dtrain.errors import CheckpointError
from dtrain.tools.checkpoint.cli import _bytes, _size, main
from tests.helpers.checkpoints import ALONE, save_good


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_good(tmp_path / "checkpoints", 100, 2)
    save_good(tmp_path / "checkpoints", 200, 3)
    return tmp_path


def save_step(directory: Path, step: int, state: dict[str, Any]) -> Path:
    return save(directory, Snapshot(step, (), state), ALONE, retention=Retention(keep_last=99))


def flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_verify_takes_a_run_a_directory_and_one_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 0
    everything = capsys.readouterr().out
    assert main(["verify", str(run / "checkpoints")]) == 0
    assert capsys.readouterr().out == everything
    assert everything.splitlines() == ["ok  step-00000100  1.8 kB  2 files", "ok  step-00000200  2.3 kB  3 files"]
    assert main(["verify", str(run / "checkpoints" / "step-00000200")]) == 0
    assert capsys.readouterr().out == "ok  step-00000200  2.3 kB  3 files\n"


def test_verify_names_the_bad_file_and_renames_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_last(run / "checkpoints" / "step-00000200" / "r0001.safetensors")
    assert main(["verify", str(run)]) == 1
    good, bad = capsys.readouterr().out.splitlines()
    assert good.startswith("ok  step-00000100")
    assert re.match(r"BAD step-00000200 r0001.safetensors: (blake3|sha256) differs \(expected ", bad)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000100", "step-00000200"]
    assert verify(run, fast=True).ok  # sizes and headers are as they were
    assert main(["verify", "--fast", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("ok  step-00000200")
    assert not verify(run).ok


def test_list_shows_each_checkpoint_and_the_quarantined_ones(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step-00000300").mkdir()
    (run / "checkpoints" / "bad-step-00000050-hash").mkdir()
    (run / "checkpoints" / "step-00000400.tmp-ab12cd34").mkdir()
    assert main(["list", str(run)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    columns = ["name", "step", "saved", "size", "files", "world", "size", "engine", "train", "loss", "val", "loss"]
    assert head.split() == [*columns, "status"]
    assert rows[0].split()[:2] == ["step-00000100", "100"]
    assert rows[0].split()[3:] == ["1.8", "kB", "2", "2", "?", "-", "-", "ok"]
    assert rows[2].split(maxsplit=9) == ["step-00000300", *"??????", "-", "-", "BAD manifest.json: missing"]
    assert rows[3:] == ["quarantined: bad-step-00000050-hash"]


def test_list_shows_losses_engine_and_who_holds_the_lease(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_step(tmp_path, 300, {"engine": "fsdp2", "metrics": {"train_loss": 1.25, "val_loss": 2.0}})
    save_step(tmp_path, 400, {"engine": 5, "metrics": {"train_loss": "low", "val_loss": None}})
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


def test_status_has_the_manifests_values(run: Path) -> None:
    first, second = list_checkpoints(run)
    assert (first.step, first.num_files, first.world_size, first.ok, first.problem) == (100, 2, 2, True, None)
    assert (first.engine, first.train_loss, first.val_loss) == (None, None, None)
    assert second.num_bytes == sum(p.stat().st_size for p in second.path.glob("*.safetensors"))
    assert second.saved_at is not None
    assert second.saved_at.endswith("+00:00")


@pytest.mark.parametrize(
    "arguments",
    [[verb, "/no/such/path"] for verb in ("verify", "list", "prune")]
    + [["export", "/no/such/path", "out"], ["diff", "/no/such/path", "b"]],
)
def test_missing_path_is_one_clear_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("dtrain: /no/such/path does not exist; give a run directory")
    assert output.err.count("\n") == 1


def test_nothing_to_verify_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"dtrain: there is no checkpoint in {tmp_path}\n"
    assert list_checkpoints(tmp_path) == []
    with pytest.raises(NoCheckpointError):
        verify(tmp_path)


def test_unfinished_save_is_never_read(tmp_path: Path) -> None:
    path = tmp_path / "step-00000100.tmp-ab12cd34"
    path.mkdir()
    with pytest.raises(CheckpointError, match="a save that never finished"):
        verify(path)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["verify"],
        ["forget", "x"],
        ["verify", "a", "b"],
        ["verify", "--quick", "a"],
        ["prune", "x", "--keep-last", "few"],
        ["export", "x"],
        ["export", "x", "y", "--dtype", "fp8"],
        ["diff", "x"],
        ["import", "x"],
    ],
)
def test_bad_usage_exits_2_with_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: dtrain checkpoint")


def test_help_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "list" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "count"), [("1", 1), ("500MB", 5 * 10**8), ("5GB", 5 * 10**9), ("5 gb", 5 * 10**9), ("2K", 2000)]
)
def test_sizes_are_parsed(text: str, count: int) -> None:
    assert _bytes(text) == count


@pytest.mark.parametrize("text", ["", "0", "0GB", "-1", "1.5GB", "GB", "5 elephants", "9" * 20])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size; write 500MB or 5GB"):
        _bytes(text)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_230_000, "1.2 MB"), (5 * 10**15, "5000.0 TB")]
)
def test_sizes_are_formatted(count: int, text: str) -> None:
    assert _size(count) == text


def test_a_checkpoint_deleted_while_it_is_read_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (100, 200):
        save_good(tmp_path, step)
    real = inspection.load_manifest

    def load_manifest(path: Path) -> Manifest:
        if path.name == "step-00000100":
            delete_checkpoint(path)
        return real(path)

    monkeypatch.setattr(inspection, "load_manifest", load_manifest)
    assert [item.path.name for item in verify(tmp_path).checkpoints] == ["step-00000200"]
    assert verify(tmp_path).ok


def test_each_manifest_is_read_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "checkpoints" / "step-00000200" / "r0001.safetensors").unlink()
    read: list[bytes] = []
    real = Manifest.decode

    def decode(data: bytes) -> Manifest:
        read.append(data)
        return real(data)

    monkeypatch.setattr(Manifest, "decode", decode)
    good, bad = list_checkpoints(run)
    assert len(read) == 2
    assert (good.ok, bad.problem, bad.num_files) == (True, "r0001.safetensors: missing", 3)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("dtrain.checkpoint.directory.quarantined_checkpoints", ["list", "{run}"]),
        ("pathlib.Path.iterdir", ["export", "a", "b"]),
    ],
)
def test_late_file_system_error_is_one_clear_line(
    run: Path, function: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", "/closed")

    monkeypatch.setattr("dtrain.checkpoint.huggingface.exporter.export", lambda path, out, **options: out)
    monkeypatch.setattr(function, refuse)
    assert main([word.format(run=run) for word in arguments]) == 2
    assert capsys.readouterr().err == "dtrain: Permission denied (errno 13): /closed\n"
