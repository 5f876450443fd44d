"""Writing of a rank's data file: one thread writes, two hash and fingerprint, and all of them end."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from dtrain.checkpoint import Snapshot, save, storage
from dtrain.checkpoint.format import hashing
from dtrain.checkpoint.format.checked_file import DamageError
from dtrain.checkpoint.format.fingerprint import fingerprint
from dtrain.checkpoint.format.integrity import load_manifest, scan_file, verify_checkpoint
from dtrain.checkpoint.format.shard_file import write_shard_file
from dtrain.checkpoint.snapshot import TensorShard
from tests.helpers.checkpoints import ALONE, shards_of

LARGE, SMALL = 700_000, 7  # elements of each of six tensors: more than the caller does alone, and less


def moments(numel: int) -> tuple[TensorShard, ...]:
    """Masters and moments of two parameters, not from their first elements on."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        TensorShard(name, kind, (numel + 5,), torch.float32, 5, numel + 5, torch.randn(numel, generator=generator))
        for name in ("a", "b")
        for kind in ("master", "exp_avg", "exp_avg_sq")
    )


def background_threads_have_ended() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == "dtrain-shard"]


@pytest.mark.parametrize("numel", [LARGE, SMALL])
def test_report_matches_the_file(tmp_path: Path, numel: int) -> None:
    shards = moments(numel)
    report = write_shard_file(tmp_path / "r0000.safetensors", shards)
    data = (tmp_path / "r0000.safetensors").read_bytes()
    assert (report["bytes"], report["digest"]) == (len(data), hashing.new_digest(report["hash"], data).hexdigest())
    assert [item["fingerprint"] for item in report["shards"]] == [fingerprint(p.data, p.start) for p in shards]
    held = load_file(tmp_path / "r0000.safetensors")
    for item, shard in zip(report["shards"], shards, strict=True):
        assert torch.equal(held[item["key"]], shard.data)
    assert background_threads_have_ended()


@pytest.mark.parametrize(("function", "numel"), [("write", LARGE), ("sync", SMALL)])
def test_full_disk_ends_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, numel: int) -> None:
    monkeypatch.setattr(storage, function, Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(OSError, match="No space left on device"):
        write_shard_file(tmp_path / "r0000.safetensors", moments(numel))
    assert background_threads_have_ended()


@pytest.mark.parametrize("numel", [LARGE, SMALL])
def test_background_error_is_raised_by_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numel: int) -> None:
    def fail(parts: object) -> Iterator[int]:
        yield 1
        raise MemoryError("no room for the weights")

    monkeypatch.setattr("dtrain.checkpoint.format.shard_file.fingerprints", fail)
    with pytest.raises(MemoryError, match="no room for the weights"):
        write_shard_file(tmp_path / "r0000.safetensors", moments(numel))
    assert background_threads_have_ended()


@pytest.mark.parametrize("where", [0.5, 1.0])
def test_flipped_bit_in_a_block_hashed_in_a_thread(tmp_path: Path, where: float) -> None:
    path = save(tmp_path, Snapshot(1, shards_of({("master", "w"): torch.randn(3_000_000)}, 0, 1), {}), ALONE)
    verify_checkpoint(path)
    data = bytearray((path / "r0000.safetensors").read_bytes())
    data[int(where * (len(data) - 1))] ^= 1
    (path / "r0000.safetensors").write_bytes(data)
    with pytest.raises(DamageError) as damage:
        verify_checkpoint(path)
    assert damage.value.tag == "hash"


def test_a_save_needs_no_thread_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12.0 and 3.12.1 start none while they wait for the last save of a script that has ended."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    test_flipped_bit_in_a_block_hashed_in_a_thread(tmp_path, 0.5)


def test_disk_error_while_a_block_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, Snapshot(1, shards_of({("master", "w"): torch.randn(3_000_000)}, 0, 1), {}), ALONE)
    manifest, threads, real = load_manifest(path), threading.active_count(), os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset > 4 << 20:  # past the first block, which is being hashed
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    slow = SimpleNamespace(update=lambda block: time.sleep(0.2))
    monkeypatch.setattr("dtrain.checkpoint.format.integrity.new_digest", lambda name, first: slow)
    with pytest.raises(OSError, match="Input/output error"):
        scan_file(path, manifest, manifest.files[0])
    assert threading.active_count() <= threads  # fewer: the heartbeats of the save may have ended since
