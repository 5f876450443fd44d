"""Mutation tests: without one fsync, rename or check of the product, a named test of the suite fails.

Each case disables one thing in the product, runs a test of the suite and expects it to fail. ``test_power_cut`` drops
the fsyncs one by one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import storage
from dtrain.checkpoint.directory import step_name
from dtrain.checkpoint.format import integrity, manifest
from dtrain.checkpoint.format.safetensors_file import read_header
from tests.faults import test_checkpoint_damage as damage
from tests.faults import test_lease as leases
from tests.faults import test_power_cut as power_cut
from tests.unit.checkpoint import test_roundtrip as roundtrip

Mutation = Callable[[pytest.MonkeyPatch], None]
Test = Callable[[Path], None]
CHECKPOINT = "dtrain.checkpoint"


# -- mutations -------------------------------------------------------------------------------------------------------


class StorageWithout:
    """The ``storage`` module with one function that does nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return (lambda *args: None) if name == self._name else getattr(storage, name)


def without(function: str, module: str) -> Mutation:
    return lambda patch: patch.setattr(f"{CHECKPOINT}.{module}.storage", StorageWithout(function))


def replaced(name: str, value: Any) -> Mutation:
    return lambda patch: patch.setattr(f"{CHECKPOINT}.{name}", value)


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


def in_place(patch: pytest.MonkeyPatch) -> None:
    """A save writes to the final name directly."""
    patch.setattr(f"{CHECKPOINT}.commit.temporary_path", lambda directory, step: directory / step_name(step))
    without("rename", "commit")(patch)


def unchecked_manifest(patch: pytest.MonkeyPatch) -> None:
    """Line 1 of the manifest is not checked."""
    decode = manifest.Manifest.decode

    def lenient(data: bytes) -> manifest.Manifest:
        body = data.partition(b"\n")[2]
        return decode(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)

    patch.setattr(manifest.Manifest, "decode", lenient)


def unchecked_headers(patch: pytest.MonkeyPatch) -> None:
    """A file's header may differ from the manifest."""
    patch.setattr(
        integrity, "read_stored_tensors", lambda descriptor, _, file: read_header(descriptor, file.name, file.bytes)
    )


def no_clean_up(patch: pytest.MonkeyPatch) -> None:
    """Neither a save nor a new holder of the lease removes leftovers."""
    for module in ("commit", "lease.lease"):
        patch.setattr(f"{CHECKPOINT}.{module}.clean_up", nothing)


# -- the tests that must fail then -------------------------------------------------------------------------------------


def cut_power_in(scenario: str) -> Test:
    def test(folder: Path) -> None:
        recording = power_cut.record(power_cut.SCENARIOS[scenario], folder / "work")
        power_cut.check_sample({scenario: recording}, 300)

    return test


def damaged_by(case: str) -> Test:
    def test(folder: Path) -> None:
        damage.make_good(folder / "template")
        damage.try_case(folder / "template", folder / "damaged", case)

    return test


def gap_between_ranks(folder: Path) -> None:
    message = "master:w: no rank or file holds elements 10 to 20 (between rank 0 and rank 1)"
    roundtrip.test_shards_that_do_not_tile_are_refused(folder, [(0, 10), (20, 35)], message)


CASES: dict[str, tuple[Mutation, Test]] = {
    "the commit's rename": (without("rename", "commit"), cut_power_in("first save of a run")),
    "the temporary name": (in_place, cut_power_in("first save of a run")),
    "the rename before a deletion": (without("rename", "directory"), cut_power_in("deletes")),
    "the clean-up": (no_clean_up, cut_power_in("cleans up")),
    "the manifest's hash": (unchecked_manifest, damaged_by("flipped 0.01 of the manifest")),
    "the set of files": (replaced("reader.check_files", nothing), damaged_by("extra shard")),
    "fingerprints of files": (replaced("reader.check_fingerprints", nothing), damaged_by("data: flipped")),
    "fingerprints in place": (
        replaced("reader.CheckpointReader.check_fingerprints", nothing),
        roundtrip.test_fingerprints_detect_wrongly_loaded_values,
    ),
    "tiling at a save": (replaced("commit.check_tiling", nothing), gap_between_ranks),
    "tiling at a load": (replaced("format.manifest.check_tiling", nothing), damaged_by("manifest: gap")),
    "the lease at the commit": (
        replaced("lease.lease.Lease.check", nothing),
        leases.test_a_save_that_has_lost_the_lease_is_not_committed,
    ),
    "headers": (unchecked_headers, damaged_by("data: header's other shape")),
}


@pytest.mark.parametrize("name", CASES)
def test_mutation_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutation, test = CASES[name]
    mutation(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(tmp_path)
