"""Every kind of damage is refused by file name, and the previous checkpoint is used (F5)."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtrain.checkpoint import open_newest, verify
from dtrain.errors import CheckpointError
from tests.helpers.checkpoints import ALONE, assert_holds, make_tensors, on_threads, save_good
from tests.helpers.damage import MANIFEST, R0, R1, Damage, change, flip, header, put, sealed, tensor, vouched


def swap(path: Path) -> None:
    (path / R0).rename(path / "x")
    (path / R1).rename(path / R0)
    (path / "x").rename(path / R1)


def link(path: Path) -> None:
    (path / R1).rename(path.parent / "elsewhere")
    (path / R1).symlink_to(path.parent / "elsewhere")


def replace_directory(path: Path, make: Callable[[], Any]) -> None:
    shutil.rmtree(path)
    make()


def first_chunk_key(fields: dict[str, Any]) -> str:
    return next(key for key in fields if key.endswith("weight"))


def rename_key(fields: dict[str, Any]) -> None:
    fields["master:other"] = fields.pop(first_chunk_key(fields))


def exchange_offsets(fields: dict[str, Any]) -> None:
    a, b = fields["exp_avg:weight"], fields["exp_avg_sq:weight"]
    a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]


def out_of_the_directory(manifest: dict[str, Any]) -> None:
    manifest["files"][0]["name"] = "../r0000.safetensors"
    for entry in manifest["tensors"]:
        for chunk in entry["chunks"]:
            chunk["file"] = chunk["file"].replace(R0, "../r0000.safetensors")


def hash_of(manifest: dict[str, Any]) -> str:
    return next(name for name in ("blake3", "sha256") if name in manifest["files"][1])


ANY = r".+"
HASH = "(blake3|sha256) differs"
CASES: dict[str, tuple[Damage, str, str]] = {
    # name: (damage, damaged file, pattern of the reason)
    **{f"flip-{file}-{where}": (flip(file, where), file, ANY) for file in (R0, R1) for where in (0, 0.01, 0.2, 0.7, 1)},
    **{f"flip-manifest-{w}": (flip(MANIFEST, w), MANIFEST, "sha256 differs") for w in (0, 0.01, 0.02, 0.3, 0.6, 1)},
    **{
        f"cut-{file}-{keep}": (change(file, lambda d, keep=keep: d[: int(keep * len(d))]), file, f"size|{HASH}")
        for file in (R0, R1, MANIFEST)
        for keep in (0, 0.1, 0.999)
    },
    **{f"extended-{f}": (change(f, lambda d: d.extend(b"\0")), f, f"size|{HASH}") for f in (R0, R1, MANIFEST)},
    **{f"zeroed-{f}": (change(f, lambda d: bytes(len(d))), f, ANY) for f in (R0, R1, MANIFEST)},
    **{f"deleted-{f}": (lambda p, f=f: (p / f).unlink(), f, "missing") for f in (R0, R1, MANIFEST)},
    "last-block-zeroed": (change(R1, lambda d: d[:-16] + bytes(16)), R1, HASH + " .expected [0-9a-f]{64}, got"),
    "swapped": (swap, R0, "size differs"),
    "copied-over": (lambda p: shutil.copy(p / R0, p / R1), R1, "size differs"),
    "file-of-another-step": (lambda p: shutil.copy(p.parent / "step-00000100" / R1, p / R1), R1, HASH),
    "manifest-of-another-step": (
        lambda p: shutil.copy(p.parent / "step-00000100" / MANIFEST, p / MANIFEST),
        MANIFEST,
        "is of step 100, not of step-00000200",
    ),
    "extra-shard": (lambda p: shutil.copy(p / R1, p / "r0002.safetensors"), "r0002.safetensors", "not listed"),
    "extra-pickle": (lambda p: (p / "x.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR."), "x.pkl", "not listed"),
    "extra-directory": (lambda p: (p / "nested").mkdir(), "nested", "not listed"),
    "extra-hidden": (lambda p: (p / ".hidden").touch(), ".hidden", "not listed"),
    "link": (link, R1, "not a regular file .lrwxrwxrwx"),
    "linked-manifest": (
        lambda p: ((p / MANIFEST).rename(p.parent / "m"), (p / MANIFEST).symlink_to(p.parent / "m")),
        MANIFEST,
        "not a regular file",
    ),
    "fifo": (lambda p: ((p / R0).unlink(), os.mkfifo(p / R0)), R0, "not a regular file .p"),
    "directory-as-file": (lambda p: ((p / R0).unlink(), (p / R0).mkdir()), R0, "not a regular file .d"),
    "empty-directory": (lambda p: replace_directory(p, p.mkdir), MANIFEST, "missing"),
    "file-as-checkpoint": (lambda p: replace_directory(p, p.touch), ".", "not a directory"),
    "link-as-checkpoint": (
        lambda p: replace_directory(p, lambda: p.symlink_to(p.parent / "step-00000100")), ".", "not a directory .l"
    ),
    "renamed-older-checkpoint": (
        lambda p: replace_directory(p, lambda: shutil.copytree(p.parent / "step-00000100", p)),
        MANIFEST,
        "is of step 100",
    ),
    # manifests with a valid hash
    "gap": (sealed(lambda m: put(tensor(m)["chunks"][1], start=19)), MANIFEST, "holds elements 18 to 19"),
    "overlap": (sealed(lambda m: put(tensor(m)["chunks"][1], start=17)), MANIFEST, "hold elements 17 to 18"),
    "short": (sealed(lambda m: put(tensor(m)["chunks"][1], stop=34)), MANIFEST, "holds elements 34 to 35"),
    "lost-chunk": (sealed(lambda m: tensor(m)["chunks"].pop()), MANIFEST, "holds elements 18 to 35"),
    "chunks-out-of-order": (sealed(lambda m: tensor(m)["chunks"].reverse()), MANIFEST, "holds elements 0 to 18"),
    "empty-chunk": (sealed(lambda m: put(tensor(m)["chunks"][0], stop=0)), MANIFEST, "which is impossible"),
    "moved-border": (
        sealed(lambda m: (put(tensor(m)["chunks"][0], stop=17), put(tensor(m)["chunks"][1], start=17))),
        R0,
        "the manifest states",
    ),
    "chunk-of-another-file": (sealed(lambda m: put(tensor(m)["chunks"][0], file=R1)), MANIFEST, "listed twice"),
    "chunk-of-no-file": (sealed(lambda m: put(tensor(m)["chunks"][0], file="r9.safetensors")), MANIFEST, "impossible"),
    "wrong-key": (sealed(lambda m: put(tensor(m)["chunks"][0], key="master:weight@7")), R0, "lists master:weight"),
    "wrong-name": (sealed(lambda m: put(tensor(m), name="weigh")), MANIFEST, "'master:weight', which is another"),
    "exchanged-kinds": (
        sealed(lambda m: (put(tensor(m, "exp_avg"), kind="exp"), put(tensor(m, "exp_avg_sq"), kind="exp_avg"),
                          put(tensor(m, "exp"), kind="exp_avg_sq"))),
        MANIFEST, "under 'exp_avg[a-z_]*:weight', which is another tensor's key",
    ),
    "exchanged-keys": (
        sealed(lambda m: (put(tensor(m, "exp_avg")["chunks"][0], key="exp_avg_sq:weight"),
                          put(tensor(m, "exp_avg_sq")["chunks"][0], key="exp_avg:weight"))),
        MANIFEST, "exp_avg:weight has a chunk under 'exp_avg_sq:weight', which is another tensor's key",
    ),
    "wrong-dtype": (sealed(lambda m: put(tensor(m), dtype="I32")), R0, "is torch.float32 .18., the manifest"),
    "unknown-dtype": (sealed(lambda m: put(tensor(m), dtype="F4")), MANIFEST, "has dtype 'F4'"),
    "wrong-shape": (sealed(lambda m: put(tensor(m), shape=[5, 8])), MANIFEST, "holds elements 35 to 40"),
    "turned-shape": (sealed(lambda m: put(tensor(m, "buffer", "mask"), shape=[3, 1])), R0, "the manifest states"),
    "negative-shape": (sealed(lambda m: put(tensor(m), shape=[-5, -7])), MANIFEST, "shape"),
    "wrong-fingerprint": (
        sealed(lambda m: put(tensor(m), fingerprint="0" * 16)), MANIFEST, "master:weight has the fingerprint"
    ),
    "no-fingerprint": (sealed(lambda m: tensor(m).pop("fingerprint")), MANIFEST, "expected the fields"),
    "lost-tensor": (sealed(lambda m: m["tensors"].remove(tensor(m))), R0, "only its header lists master:weight"),
    "tensor-twice": (sealed(lambda m: m["tensors"].append(tensor(m))), MANIFEST, "listed twice"),
    "unknown-hash": (
        sealed(lambda m: put(m["files"][1], md5=m["files"][1].pop(hash_of(m)))), MANIFEST, "unknown hash 'md5'"
    ),
    "two-hashes": (sealed(lambda m: put(m["files"][1], md5="0" * 64)), MANIFEST, "expected the fields"),
    "no-hash": (sealed(lambda m: m["files"][1].pop(hash_of(m))), MANIFEST, "expected the fields"),
    "short-hash": (sealed(lambda m: put(m["files"][1], **{hash_of(m): "0" * 63})), MANIFEST, "is not a digest of"),
    "version-of-other-hashes": (sealed(lambda m: put(m, version=3 - m["version"])), MANIFEST, "for the hashes"),
    "file-twice": (sealed(lambda m: m["files"].append(m["files"][0])), MANIFEST, "listed twice"),
    "file-not-listed": (sealed(lambda m: m["files"].pop()), MANIFEST, "which is impossible"),
    "path-traversal": (sealed(out_of_the_directory), MANIFEST, "the name of a data file"),
    "absolute-path": (sealed(lambda m: put(m["files"][0], name="/etc/passwd")), MANIFEST, "the name of a data file"),
    "newline-in-name": (sealed(lambda m: put(m["files"][0], name=R0 + "\n")), MANIFEST, "the name of a data file"),
    "wrong-size": (sealed(lambda m: put(m["files"][1], bytes=8)), R1, "size differs .expected 8 bytes"),
    "size-as-text": (sealed(lambda m: put(m["files"][1], bytes="8")), MANIFEST, "bytes is '8', expected int"),
    "size-as-truth": (sealed(lambda m: put(m["files"][1], bytes=True)), MANIFEST, "bytes is True"),
    "other-format": (sealed(lambda m: put(m, format="zip")), MANIFEST, "expected 'dtrain-checkpoint' version 1"),
    "later-version": (sealed(lambda m: put(m, version=3)), MANIFEST, "read it with the dtrain that wrote it"),
    "extra-field": (sealed(lambda m: put(m, extra=1)), MANIFEST, "expected the fields"),
    "lost-field": (sealed(lambda m: m.pop("state")), MANIFEST, "expected the fields"),
    "step-changed": (sealed(lambda m: put(m, step=201)), MANIFEST, "is of step 201"),
    "not-an-object": (sealed(lambda m: b"[]"), MANIFEST, "expected a JSON object"),
    "nan": (sealed(lambda m: json.dumps({**m, "state": {"a": float("nan")}}).encode()), MANIFEST, "NaN is not JSON"),
    "key-twice": (sealed(lambda m: b'{"a":1,"a":2}'), MANIFEST, "a key appears twice"),
    "deeply-nested": (sealed(lambda m: b"[" * 200_000), MANIFEST, "not readable as JSON"),
    "not-utf8": (sealed(lambda m: b'{"\xff":1}'), MANIFEST, "not readable as JSON"),
    # data files with valid hashes in the manifest
    "huge-header": (vouched(R0, lambda d: (2**63).to_bytes(8, "little") + d[8:]), R0, "does not fit"),
    "header-past-the-end": (vouched(R0, lambda d: len(d).to_bytes(8, "little") + d[8:]), R0, "does not fit"),
    "too-short-for-a-header": (vouched(R0, lambda d: b"1234"), R0, "too few"),
    "header-not-json": (header(lambda h: b"\x80\x04pickled"), R0, "not readable as JSON"),
    "header-not-an-object": (header(lambda h: b"[1]"), R0, "expected a JSON object"),
    "header-metadata": (header(lambda h: put(h, __metadata__=3)), R0, "__metadata__"),
    "header-entry": (header(lambda h: put(h, **{"master:weight": [1]})), R0, "is not dtype, shape, data_offsets"),
    "header-dtype": (header(lambda h: put(h["master:weight"], dtype="F33")), R0, "unknown dtype"),
    "header-other-dtype": (header(lambda h: put(h["master:weight"], dtype="I32")), R0, "the manifest states"),
    "header-shape": (header(lambda h: put(h["master:weight"], shape=[99])), R0, "does not fill bytes"),
    "header-other-shape": (header(lambda h: put(h["master:weight"], shape=[2, 9])), R0, "the manifest states"),
    "header-offsets": (header(lambda h: put(h["master:weight"], data_offsets=[-8, 64])), R0, "and the offsets"),
    "header-far-offsets": (header(lambda h: put(h["exp_avg:weight"], data_offsets=[2**40, 2**40 + 72])), R0, "begins"),
    "header-exchanged": (header(exchange_offsets), MANIFEST, "exp_avg:weight has the fingerprint"),
    "header-key": (header(rename_key), R0, "lists master:"),
    "data-longer": (vouched(R0, lambda d: d + bytes(8)), R0, "its tensors end at byte"),
    "data-shorter": (vouched(R0, lambda d: d[:-1]), R0, "its tensors end at byte"),
    "data-flipped": (vouched(R1, lambda d: d[:-1] + bytes([d[-1] ^ 1])), MANIFEST, "has the fingerprint"),
}  # fmt: skip


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("template")
    save_good(directory, 100)
    save_good(directory, 200)
    return directory


@pytest.mark.parametrize("name", CASES)
def test_damage_is_refused_by_name_and_the_previous_one_used(tmp_path: Path, template: Path, name: str) -> None:
    damage, file, reason = CASES[name]
    directory = tmp_path / "checkpoints"
    shutil.copytree(template, directory)
    damage(directory / "step-00000200")

    good, bad = verify(directory).checkpoints
    assert good.ok
    assert bad.problem is not None
    assert re.match(f"{re.escape(file)}: .*({reason})", bad.problem), bad.problem
    if not (directory / "step-00000200").is_symlink():  # a link that is requested by name is followed
        with pytest.raises(CheckpointError, match=f"step-00000200 cannot be used: {re.escape(file)}: "):
            open_newest(directory / "step-00000200", ALONE)
    assert (directory / "step-00000200").exists()

    world = 2 if len(name) % 2 else 1
    for reader in on_threads(world, lambda comm: open_newest(directory, comm)):
        assert reader.step == 100
        assert_holds(reader, make_tensors(100))
    left = sorted(path.name for path in directory.iterdir() if "step" in path.name)
    assert len(left) == 2
    assert re.fullmatch(r"bad-step-00000200-[a-z0-9-]+", left[0])  # renamed, never deleted


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([R0, R1, MANIFEST]), st.floats(0, 1), st.integers(0, 7))
def test_any_flipped_bit_is_refused(template: Path, tmp_path: Path, file: str, where: float, bit: int) -> None:
    path = tmp_path / "step-00000200"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(template / path.name, path)
    assert verify(path).ok
    data = bytearray((path / file).read_bytes())
    data[min(int(where * len(data)), len(data) - 1)] ^= 1 << bit
    (path / file).write_bytes(data)
    (checked,) = verify(path).checkpoints
    assert checked.problem is not None
    assert checked.problem.startswith(f"{file}: ")


def test_all_damaged_is_an_error_that_names_each(tmp_path: Path, template: Path) -> None:
    directory = tmp_path / "checkpoints"
    shutil.copytree(template, directory)
    flip(R0, 0.9)(directory / "step-00000100")
    flip(R1, 0.9)(directory / "step-00000200")
    for error in on_threads(2, lambda comm: open_newest(directory, comm)):
        assert isinstance(error, CheckpointError)
        assert re.search(f"step-00000200: {R1}: {HASH}.*step-00000100: {R0}: {HASH}", str(error))


def test_second_damaged_checkpoint_gets_another_name(tmp_path: Path, template: Path) -> None:
    directory = tmp_path / "checkpoints"
    shutil.copytree(template, directory)
    for count in (1, 2):
        flip(R1, 0.9)(directory / "step-00000200")
        assert open_newest(directory, ALONE).step == 100
        if count == 1:
            shutil.copytree(template / "step-00000200", directory / "step-00000200")
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["bad-step-00000200-hash", "bad-step-00000200-hash-2", "step-00000100"]


def test_unreadable_checkpoint_is_skipped_and_keeps_its_name(
    tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "checkpoints"
    shutil.copytree(template, directory)
    real = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if "step-00000200" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr("os.open", refuse)
    for reader in on_threads(2, lambda comm: open_newest(directory, comm)):
        assert reader.step == 100
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000100", "step-00000200"]


def test_loads_from_a_read_only_file_system(tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "checkpoints"
    shutil.copytree(template, directory)
    flip(R1, 0.9)(directory / "step-00000200")

    def refuse(source: Path, target: Path) -> None:
        raise OSError(30, "Read-only file system", str(source))

    monkeypatch.setattr("dtrain.checkpoint.storage.rename", refuse)
    assert open_newest(directory, ALONE).step == 100
    assert (directory / "step-00000200").exists()


def test_ranks_that_see_different_directories_are_told_so(tmp_path: Path) -> None:
    save_good(tmp_path / "host0", 10, 2)
    save_good(tmp_path / "host1", 10, 3)
    errors = on_threads(2, lambda comm: open_newest(tmp_path / f"host{comm.rank}" / "step-00000010", comm))
    assert all("is not the same directory on ranks 0 and 1" in str(error) for error in errors), errors
