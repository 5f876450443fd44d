"""Every kind of damage is refused by file name, and the previous checkpoint is used (F5)."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import open_newest, verify
from dtrain.errors import CheckpointError
from tests.helpers.checkpoints import ALONE, assert_holds, make_tensors, on_threads, save_good
from tests.helpers.damage import MANIFEST, R0, R1, Damage, change, flip, header, put, sealed, tensor, vouched
from tests.helpers.fault_counts import FaultCounts

OLDER, NEWEST = "step-00000100", "step-00000200"
Case = tuple[Damage, str, str]
"""A damage, the file that is named, and a pattern of the reason."""


def swap(path: Path) -> None:
    (path / R0).rename(path / "x")
    (path / R1).rename(path / R0)
    (path / "x").rename(path / R1)


def linked(file: str) -> Damage:
    return lambda path: ((path / file).rename(path.parent / "x"), (path / file).symlink_to(path.parent / "x"))


def instead(make: Callable[[Path], Any], file: str = "") -> Damage:
    """Replaces a file, or the checkpoint, by what ``make`` creates there."""

    def apply(path: Path) -> None:
        (path / file).unlink(missing_ok=True) if file else shutil.rmtree(path)
        make(path / file)

    return apply


def exchange_offsets(fields: dict[str, Any]) -> None:
    a, b = fields["exp_avg:weight"], fields["exp_avg_sq:weight"]
    a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]


def out_of_the_directory(manifest: dict[str, Any]) -> None:
    manifest["files"][0]["name"] = f"../{R0}"
    for entry in manifest["tensors"]:
        for chunk in entry["chunks"]:
            chunk["file"] = chunk["file"].replace(R0, f"../{R0}")


def of_file(edit: Callable[[dict[str, Any], str], Any]) -> Damage:
    """Edits the manifest's entry of the second file, given the name of its hash."""
    return sealed(lambda m: edit(file := m["files"][1], "blake3" if "blake3" in file else "sha256"))


def of_tensor(kind: str = "master", name: str = "weight", **values: Any) -> Damage:
    """Replaces fields of the manifest's entry of a tensor."""
    return sealed(lambda manifest: put(tensor(manifest, kind, name), **values))


def of_chunk(number: int, **values: Any) -> Damage:
    """Replaces fields of a chunk of master:weight, whose chunks are [0, 18) in R0 and [18, 35) in R1."""
    return sealed(lambda manifest: put(tensor(manifest)["chunks"][number], **values))


def of_header(key: str = "master:weight", **values: Any) -> Damage:
    """Replaces fields of a tensor in the header of R0."""
    return header(lambda fields: put(fields[key], **values))


HASH = "(blake3|sha256) differs"
FILES: dict[str, Case] = {  # nothing is changed with it
    **{f"flipped {where} of {file}": (flip(file, where), file, "") for file in (R0, R1) for where in (0, 0.2, 1)},
    **{f"flipped {where} of the manifest": (flip(MANIFEST, where), MANIFEST, "sha256 differs") for where in (0.01, 1)},
    **{f"cut {f}": (change(f, lambda d: d[: len(d) - 1]), f, f"size|{HASH}") for f in (R0, MANIFEST)},
    **{f"emptied {f}": (change(f, lambda d: b""), f, f"size|{HASH}") for f in (R1, MANIFEST)},
    **{f"extended {f}": (change(f, lambda d: d.extend(b"\0")), f, f"size|{HASH}") for f in (R0, MANIFEST)},
    **{f"zeroed {f}": (change(f, lambda d: bytes(len(d))), f, "") for f in (R0, MANIFEST)},
    **{f"deleted {f}": (lambda path, f=f: (path / f).unlink(), f, "missing") for f in (R0, R1, MANIFEST)},
    "last block zeroed": (change(R1, lambda d: d[:-16] + bytes(16)), R1, HASH + " .expected [0-9a-f]{64}, got"),
    "swapped": (swap, R0, "size differs"),
    "file of another step": (lambda path: shutil.copy(path.parent / OLDER / R1, path / R1), R1, HASH),
    "manifest of another step": (
        lambda path: shutil.copy(path.parent / OLDER / MANIFEST, path), MANIFEST, f"is of step 100, not of {NEWEST}"
    ),
    "extra shard": (lambda path: shutil.copy(path / R1, path / "r2.safetensors"), "r2.safetensors", "not listed"),
    "extra directory": (lambda path: (path / "nested").mkdir(), "nested", "not listed"),
    "hidden file": (lambda path: (path / ".hidden").touch(), ".hidden", "not listed"),
    "link": (linked(R1), R1, "not a regular file .lrwxrwxrwx"),
    "linked manifest": (linked(MANIFEST), MANIFEST, "not a regular file"),
    "fifo": (instead(os.mkfifo, R0), R0, "not a regular file .p"),
    "directory as file": (instead(Path.mkdir, R0), R0, "not a regular file .d"),
    "empty directory": (instead(Path.mkdir), MANIFEST, "missing"),
    "file as checkpoint": (instead(Path.touch), ".", "not a directory"),
    "link as checkpoint": (instead(lambda path: path.symlink_to(path.parent / OLDER)), ".", "not a directory .l"),
    "renamed older one": (
        instead(lambda path: shutil.copytree(path.parent / OLDER, path)), MANIFEST, "is of step 100"
    ),
}  # fmt: skip
MANIFESTS: dict[str, tuple[Damage, str]] = {  # with a valid hash of the manifest, which is named
    "gap": (of_chunk(1, start=19), "holds elements 18 to 19"),
    "overlap": (of_chunk(1, start=17), "hold elements 17 to 18"),
    "short": (of_chunk(1, stop=34), "holds elements 34 to 35"),
    "long": (of_chunk(1, stop=36), "holds elements up to 36 of 35"),
    "lost chunk": (sealed(lambda m: tensor(m)["chunks"].pop()), "holds elements 18 to 35"),
    "empty chunk": (of_chunk(0, stop=0), "which is impossible"),
    "chunk of another file": (of_chunk(0, file=R1), "listed twice"),
    "chunk of no file": (of_chunk(0, file="r9.safetensors"), "impossible"),
    "another tensor's key": (of_chunk(0, key="exp_avg:weight"), "under 'exp_avg:weight', which is another tensor's"),
    "a longer key": (of_chunk(0, key="master:weights"), "under 'master:weights', which is another tensor's key"),
    "wrong name": (sealed(lambda m: put(tensor(m), name="weigh")), "'master:weight', which is another"),
    "unknown dtype": (of_tensor(dtype="F4"), "has dtype 'F4'"),
    "wrong shape": (of_tensor(shape=[5, 8]), "holds elements 35 to 40"),
    "negative shape": (of_tensor(shape=[-5, -7]), "shape"),
    "wrong fingerprint": (of_tensor(fingerprint="0" * 16), "master:weight has the fingerprint"),
    "long fingerprint": (of_tensor(fingerprint="0" * 17), "fingerprint '0+'"),
    "no fingerprint": (sealed(lambda m: tensor(m).pop("fingerprint")), "expected the fields"),
    "tensor twice": (sealed(lambda m: m["tensors"].append(tensor(m))), "listed twice"),
    "unknown hash": (of_file(lambda file, name: put(file, md5=file.pop(name))), "unknown hash 'md5'"),
    "two hashes": (of_file(lambda file, name: put(file, md5="0" * 64)), "expected the fields"),
    "no hash": (of_file(lambda file, name: file.pop(name)), "expected the fields"),
    "short hash": (of_file(lambda file, name: put(file, **{name: "0" * 63})), "is not a digest of"),
    "size as text": (of_file(lambda file, name: put(file, bytes="8")), "bytes is '8', expected int"),
    "size as truth": (of_file(lambda file, name: put(file, bytes=True)), "bytes is True"),
    "absolute path": (of_file(lambda file, name: put(file, name="/etc/passwd")), "the name of a data file"),
    "path with a line end": (of_file(lambda file, name: put(file, name=R0 + "\n")), "the name of a data file"),
    "path upwards": (sealed(out_of_the_directory), "the name of a data file"),
    "version of other hashes": (sealed(lambda m: put(m, version=3 - m["version"])), "for the hashes"),
    "file twice": (sealed(lambda m: m["files"].append(m["files"][0])), "listed twice"),
    "file not listed": (sealed(lambda m: m["files"].pop()), "which is impossible"),
    "other format": (sealed(lambda m: put(m, format="zip")), "expected 'dtrain-checkpoint' version 1"),
    "later version": (sealed(lambda m: put(m, version=3)), "read it with the dtrain that wrote it"),
    "extra field": (sealed(lambda m: put(m, extra=1)), "expected the fields"),
    "lost field": (sealed(lambda m: m.pop("state")), "expected the fields"),
    "time": (sealed(lambda m: put(m, saved_at="today")), "'today', which is not a time"),
    "step": (sealed(lambda m: put(m, step=201)), "is of step 201"),
    "not an object": (sealed(lambda m: b"[]"), "expected a JSON object"),
    "NaN": (sealed(lambda m: json.dumps({**m, "state": {"a": float("nan")}}).encode()), "NaN is not JSON"),
    "infinite": (sealed(lambda m: b'{"step":1e400}'), "1e400 is not JSON"),
    "key twice": (sealed(lambda m: b'{"a":1,"a":2}'), "a key appears twice"),
    "not UTF-8": (sealed(lambda m: b'{"\xff":1}'), "not readable as JSON"),
}  # fmt: skip
DATA: dict[str, Case] = {  # manifest or data file contradict each other; all hashes are valid
    "moved border": (
        sealed(lambda m: (put(tensor(m)["chunks"][0], stop=17), put(tensor(m)["chunks"][1], start=17))),
        R0, "the manifest states",
    ),
    "another key": (of_chunk(0, key="master:weight@7"), R0, "lists master:weight"),
    "another dtype": (of_tensor(dtype="I32"), R0, "is torch.float32 .18., the manifest"),
    "turned shape": (of_tensor("buffer", "mask", shape=[3, 1]), R0, "the manifest states"),
    "lost tensor": (sealed(lambda m: m["tensors"].remove(tensor(m))), R0, "only its header lists master:weight"),
    "wrong size": (of_file(lambda file, name: put(file, bytes=8)), R1, "size differs .expected 8 bytes"),
    "header past the end": (vouched(R0, lambda d: (len(d) - 7).to_bytes(8, "little") + d[8:]), R0, "does not fit"),
    "too short for a header": (vouched(R0, lambda d: b"1234"), R0, "too few"),
    "header not JSON": (header(lambda h: b"\x80\x04pickled"), R0, "not readable as JSON"),
    "header not an object": (header(lambda h: b"[1]"), R0, "expected a JSON object"),
    "header's metadata": (header(lambda h: put(h, __metadata__=3)), R0, "__metadata__"),
    "header's entry": (header(lambda h: put(h, **{"master:weight": [1]})), R0, "is not dtype, shape, data_offsets"),
    "header's dtype": (of_header(dtype="F33"), R0, "unknown dtype"),
    "header's other dtype": (of_header(dtype="I32"), R0, "the manifest states"),
    "header's shape": (of_header(shape=[99]), R0, "does not fill bytes"),
    "header's other shape": (of_header(shape=[2, 9]), R0, "the manifest states"),
    "header's offsets": (of_header(data_offsets=[-8, 64]), R0, "and the offsets"),
    "header's three offsets": (of_header(data_offsets=[0, 72, 72]), R0, "and the offsets"),
    "header's far offsets": (of_header("exp_avg:weight", data_offsets=[2**40, 2**40 + 72]), R0, "begins"),
    "header's exchanged offsets": (header(exchange_offsets), MANIFEST, "exp_avg:weight has the fingerprint"),
    "header's key": (header(lambda h: put(h, **{"master:other": h.pop("master:weight")})), R0, "lists master:"),
    "longer": (vouched(R0, lambda d: d + bytes(8)), R0, "its tensors end at byte"),
    "shorter": (vouched(R0, lambda d: d[:-1]), R0, "its tensors end at byte"),
    "flipped": (vouched(R1, lambda d: d[:-1] + bytes([d[-1] ^ 1])), MANIFEST, "has the fingerprint"),
}  # fmt: skip
CASES: dict[str, Case] = {
    **FILES,
    **{f"manifest: {name}": (damage, MANIFEST, reason) for name, (damage, reason) in MANIFESTS.items()},
    **{f"data: {name}": case for name, case in DATA.items()},
}


def make_good(directory: Path) -> Path:
    for step in (100, 200):
        save_good(directory, step)
    return directory


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_good(tmp_path_factory.mktemp("template"))


@pytest.fixture
def directory(template: Path, tmp_path: Path) -> Path:
    """Two good checkpoints, to be damaged."""
    return shutil.copytree(template, tmp_path / "checkpoints")


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if "step" in path.name)


def assert_refused(directory: Path, file: str = "", reason: str = "") -> None:
    """Asserts that the newest checkpoint is refused by name and set aside, and that the older one is used."""
    newest = directory / NEWEST
    good, bad = verify(directory).checkpoints
    assert good.ok
    assert bad.problem is not None
    assert re.match(f"{re.escape(file)}.*({reason})", bad.problem), bad.problem
    if not newest.is_symlink():  # a link that is requested by name is followed
        with pytest.raises(CheckpointError, match=f"{NEWEST} cannot be used: {re.escape(file)}") as error:
            open_newest(newest, ALONE)
        assert len(str(error.value)) < 2000
    assert os.path.lexists(newest)
    for reader in on_threads(2, lambda comm: open_newest(directory, comm)):
        assert reader.step == 100
        assert_holds(reader, make_tensors(100))
    bad_one, good_one = names_in(directory)
    assert re.fullmatch(rf"bad-{NEWEST}-[a-z0-9-]+", bad_one), "renamed, never deleted"
    assert good_one == OLDER


def test_damage_is_refused_by_name_and_the_previous_one_used(
    template: Path, tmp_path: Path, faults: FaultCounts
) -> None:
    wrong = []
    for number, (name, (damage, file, reason)) in enumerate(CASES.items()):
        directory = shutil.copytree(template, tmp_path / str(number))
        damage(directory / NEWEST)
        try:
            assert_refused(directory, f"{file}: ", reason)
        except Exception as error:
            wrong.append(f"{name}: {error!s:.300}")
    assert not wrong, "\n".join(wrong)
    faults.passed("F5", len(CASES), refused=len(CASES))


def test_all_damaged_is_an_error_that_names_each(directory: Path) -> None:
    flip(R0, 0.9)(directory / OLDER)
    flip(R1, 0.9)(directory / NEWEST)
    for error in on_threads(2, lambda comm: open_newest(directory, comm)):
        assert isinstance(error, CheckpointError)
        assert re.search(f"{NEWEST}: {R1}: {HASH}.*{OLDER}: {R0}: {HASH}", str(error))


def test_second_damaged_checkpoint_gets_another_name(directory: Path, template: Path) -> None:
    for count in (1, 2):
        flip(R1, 0.9)(directory / NEWEST)
        assert open_newest(directory, ALONE).step == 100
        if count == 1:
            shutil.copytree(template / NEWEST, directory / NEWEST)
    assert names_in(directory) == [f"bad-{NEWEST}-hash", f"bad-{NEWEST}-hash-2", OLDER]


def test_what_cannot_be_read_or_renamed_keeps_its_name(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse_to_open(path: Any, *args: Any, **kwargs: Any) -> int:
        if NEWEST in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    def refuse_to_rename(source: Path, target: Path) -> None:
        raise OSError(30, "Read-only file system", str(source))

    with monkeypatch.context() as patch:
        patch.setattr("os.open", refuse_to_open)
        assert [reader.step for reader in on_threads(2, lambda comm: open_newest(directory, comm))] == [100, 100]
    flip(R1, 0.9)(directory / NEWEST)
    monkeypatch.setattr("dtrain.checkpoint.storage.rename", refuse_to_rename)
    assert open_newest(directory, ALONE).step == 100
    assert names_in(directory) == [OLDER, NEWEST]


def test_ranks_that_see_different_directories_are_told_so(tmp_path: Path) -> None:
    save_good(tmp_path / "host0", 10, 2)
    save_good(tmp_path / "host1", 10, 3)
    errors = on_threads(2, lambda comm: open_newest(tmp_path / f"host{comm.rank}" / "step-00000010", comm))
    assert all("is not the same directory on ranks 0 and 1" in str(error) for error in errors), errors
