"""A disk that is full when a run starts ends it with one line that names the file and exit code 1 (P11)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain.__main__ import main
from dtrain.checkpoint import storage
from dtrain.tools.report_dir import make_run_dir
from tests.helpers.fault_counts import FaultCounts

TINY = [
    *("model.num_layers=1", "model.hidden_dim=16", "model.num_heads=2", "model.max_seq_len=16", "data=text"),
    *("train.steps=1", "train.sample_tokens=0", "precision=fp32", "optim.compile=false", "launch.device=cpu"),
]
FAULTS = {errno.ENOSPC: 1, errno.EDQUOT: 1, errno.EIO: 1, errno.EACCES: 2, errno.ENOTDIR: 2, errno.EROFS: 2}
"""Error -> exit code: 1 if it may pass, 2 if the folder is no place for a run."""


def failing(call: Callable[..., Any], is_target: Callable[..., bool], number: int) -> Callable[..., Any]:
    def instead(*args: Any, **options: Any) -> Any:
        if is_target(*args):
            raise OSError(number, os.strerror(number), str(args[0]) if isinstance(args[0], (str, Path)) else None)
        return call(*args, **options)

    return instead


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "a.txt").write_text("to be, or not to be " * 100)
    return ["train", *TINY, f"data.files={tmp_path}/a.txt", "data.validation_percent=0", f"run_dir={tmp_path}/run"]


def assert_ends(words: list[str], file: Path, capsys: Any) -> None:
    capsys.readouterr()
    assert main(words) == 1
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dtrain: ")]
    assert str(file) in error
    assert "cannot be written" in error


def test_files_of_a_run(words: list[str], tmp_path: Path, capsys: Any, faults: FaultCounts) -> None:
    run = tmp_path / "run"
    run.mkdir()
    # a write to /dev/full fails as one to a full disk does
    files = {"restarts.json": [], "config.yaml": [], "precision.json": [], "tracker.json": ["tracker=wandb"]}
    for file, options in files.items():
        temporary = run / f"{file}.tmp"
        temporary.symlink_to("/dev/full")
        assert_ends([*words, *options], run / file, capsys)
        temporary.unlink()
        (run / file).unlink(missing_ok=True)
    faults.passed("P11", len(files))


def test_directories_and_opened_files(words: list[str], tmp_path: Path, capsys: Any, faults: FaultCounts) -> None:
    run = tmp_path / "run"
    patches: list[tuple[Any, str, Callable[..., bool], Path]] = [
        (storage, "make_directory", lambda path: path.name == "run", run),
        (storage, "make_directory", lambda path: path.name == "checkpoints", run / "checkpoints"),
        (storage, "create", lambda path: True, run / "checkpoints"),
        (Path, "open", lambda path, *_: path.name == "restarts.json.tmp", run / "restarts.json"),
        (Path, "open", lambda path, *_: path.name == "metrics.jsonl", run / "metrics.jsonl"),
    ]
    for owner, name, is_target, file in patches:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, failing(getattr(owner, name), is_target, errno.ENOSPC))
            assert_ends(words, file, capsys)
    faults.passed("P11", len(patches))


def test_the_folder_of_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: FaultCounts) -> None:
    for number, code in FAULTS.items():
        with monkeypatch.context() as patch:
            patch.setattr(Path, "mkdir", failing(Path.mkdir, lambda *_: True, number))
            with pytest.raises(Exception, match=str(tmp_path / "report")) as refusal:
                make_run_dir(str(tmp_path / "report"), "probe")
            assert refusal.value.exit_code == code  # type: ignore[attr-defined]
    faults.passed("P11", len(FAULTS))
