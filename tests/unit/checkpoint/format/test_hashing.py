"""The hash of a data file: known digests, and checkpoints that are saved and read with and without BLAKE3's package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dtrain.checkpoint import Snapshot, open_newest, save, verify
from dtrain.checkpoint.format import hashing
from dtrain.checkpoint.format.checked_file import DamageError
from dtrain.errors import CheckpointError
from tests.helpers.checkpoints import ALONE, shards_of
from tests.helpers.damage import R0, flip

pytest.importorskip("blake3")

EMPTY = {
    "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "blake3": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
}


def saved(folder: Path, step: int = 1, numel: int = 40) -> Path:
    return save(folder, Snapshot(step, shards_of({("master", "w"): torch.arange(float(numel))}, 0, 1), {}), ALONE)


def files_of(checkpoint: Path) -> tuple[int, list[set[str]]]:
    manifest = json.loads((checkpoint / "manifest.json").read_bytes().partition(b"\n")[2])
    return manifest["version"], [set(file) for file in manifest["files"]]


@pytest.fixture
def no_blake3(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setitem(hashing._CONSTRUCTORS, "blake3", None)
    return monkeypatch


@pytest.mark.parametrize("name", sorted(hashing.NAMES))
def test_digests(name: str) -> None:
    assert hashing.new_digest(name, b"").hexdigest() == EMPTY[name]
    whole, parts = hashing.new_digest(name, b"abcdef"), hashing.new_digest(name, b"ab")
    parts.update(memoryview(b"cdef"))
    assert whole.hexdigest() == parts.hexdigest() != EMPTY[name]


def test_a_save_uses_blake3_and_its_manifest_names_it(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert files_of(path) == (2, [{"name", "bytes", "blake3"}])
    assert verify(path).ok


def test_without_the_package_sha256_is_used_in_the_older_format(tmp_path: Path, no_blake3: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    assert files_of(path) == (1, [{"name", "bytes", "sha256"}])
    assert verify(path).ok
    no_blake3.undo()
    assert verify(path).ok
    assert open_newest(tmp_path, ALONE).read("master", "w").tolist() == list(range(40))
    flip(R0, 0.9)(path)
    with pytest.raises(CheckpointError, match=f"{R0}: sha256 differs"):
        open_newest(tmp_path, ALONE)


def test_a_checkpoint_whose_hash_is_unknown_here_stays(tmp_path: Path, no_blake3: pytest.MonkeyPatch) -> None:
    older = saved(tmp_path, step=1)
    no_blake3.undo()
    newer = saved(tmp_path, step=2)
    no_blake3.setitem(hashing._CONSTRUCTORS, "blake3", None)
    with pytest.raises(CheckpointError, match="hashed with blake3, whose package is missing here: pip") as error:
        open_newest(tmp_path, ALONE)
    assert not isinstance(error.value, DamageError)
    assert older.is_dir()
    assert newer.is_dir()
    first, second = verify(tmp_path).checkpoints
    assert first.ok
    assert "pip install blake3" in str(second.problem)
