"""Random corruptions of every kind: each is refused or changes nothing that is loaded (F5).

``test_checkpoint_damage`` has chosen damages with the expected message of each.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import open_newest, verify
from dtrain.errors import CheckpointError
from tests.faults.test_checkpoint_damage import NEWEST, OLDER, make_good, names_in
from tests.faults.test_manifest_edits import EDITS
from tests.helpers.checkpoints import ALONE, assert_holds, make_tensors
from tests.helpers.damage import MANIFEST, R0, R1, change, header, vouched
from tests.helpers.fault_counts import FEW_AND_MANY, FaultCounts

FILES = (R0, R1, MANIFEST)
Kind = Callable[[Path, random.Random], None]


def interval(data: bytes | bytearray, rng: random.Random) -> tuple[int, int]:
    begin = rng.randrange(len(data))
    return begin, min(begin + rng.choice((1, 8, 64, 512)), len(data))


# -- bytes of a file, without its hashes -------------------------------------------------------------------------------


def flipped(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 9))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def truncated(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def extended(data: bytearray, rng: random.Random) -> None:
    data.extend(rng.choice((bytes(rng.randint(1, 600)), rng.randbytes(rng.randint(1, 600)), b"\n", data)))


def zeroed(data: bytearray, rng: random.Random) -> None:
    begin, end = interval(data, rng)
    data[begin:end] = bytes(end - begin)


def shifted(data: bytearray, rng: random.Random) -> None:
    begin, end = interval(data, rng)
    if rng.random() < 0.5:
        data[begin:begin] = data[begin:end]
    else:
        del data[begin:end]


def exchanged_inside(data: bytearray, rng: random.Random) -> None:
    size = rng.choice((1, 4, 64))
    one, other = (rng.randrange(len(data) - size) for _ in range(2))
    data[one : one + size], data[other : other + size] = data[other : other + size], data[one : one + size]


# -- files of a checkpoint ---------------------------------------------------------------------------------------------


def deleted(path: Path, rng: random.Random) -> None:
    for file in rng.sample(FILES, rng.randint(1, 3)):
        (path / file).unlink()


def swapped(path: Path, rng: random.Random) -> None:
    one, other = rng.sample(FILES, 2)
    if rng.random() < 0.5:
        shutil.copy(path / one, path / other)
        return
    (path / one).rename(path / "x")
    (path / other).rename(path / one)
    (path / "x").rename(path / other)


def extra(path: Path, rng: random.Random) -> None:
    stem = "".join(rng.choices("ab01-._ é", k=rng.randint(1, 8)))
    name = stem.strip(".") + rng.choice(("", ".safetensors", ".json", ".pkl", ".tmp"))
    if rng.random() < 0.2:
        (path / f"x{name}").mkdir()
    else:
        (path / f"x{name}").write_bytes(rng.choice((b"", (path / R0).read_bytes(), b"\x80\x04N.")))


def linked(path: Path, rng: random.Random) -> None:
    file = path / rng.choice(FILES)
    elsewhere = path.parent / f"elsewhere-{rng.randrange(10**9)}"
    target = rng.choice((elsewhere, path.parent / OLDER / file.name, Path("/dev/zero"), path / "nothing"))
    file.rename(elsewhere)
    file.symlink_to(target)


def of_another_kind(path: Path, rng: random.Random) -> None:
    file = path / rng.choice(FILES)
    file.unlink()
    rng.choice((Path.mkdir, os.mkfifo))(file)


def of_another_step(path: Path, rng: random.Random) -> None:
    files = rng.sample(FILES, rng.randint(1, 3))
    for file in files:
        shutil.copy(path.parent / OLDER / file, path / file)


# -- with valid hashes -------------------------------------------------------------------------------------------------


def header_edited(path: Path, rng: random.Random) -> None:
    header(lambda fields: rng.choice(EDITS)(fields, rng), rng.choice((R0, R1)))(path)


def header_exchanged(path: Path, rng: random.Random) -> None:
    """Exchanges the data of two tensors of one size: only the fingerprints differ."""

    def edit(fields: dict[str, Any]) -> None:
        groups: dict[int, list[dict[str, Any]]] = {}
        for key, field in fields.items():
            if key != "__metadata__":
                begin, end = field["data_offsets"]
                groups.setdefault(end - begin, []).append(field)
        one, other = rng.sample(rng.choice([group for group in groups.values() if len(group) > 1]), 2)
        one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]

    header(edit, rng.choice((R0, R1)))(path)


def data_edited(path: Path, rng: random.Random) -> None:
    """Only the fingerprints differ from the file's content."""

    def edit(data: bytes) -> bytes:
        begin = 8 + int.from_bytes(data[:8], "little")
        body = bytearray(data[begin:])
        rng.choice((flipped, zeroed, exchanged_inside))(body, rng)
        return data[:begin] + body

    vouched(rng.choice((R0, R1)), edit)(path)


def of_any_file(edit: Callable[[bytearray, random.Random], Any]) -> Kind:
    return lambda path, rng: change(rng.choice(FILES), lambda data: edit(data, rng))(path)


OF_BYTES = (flipped, truncated, extended, zeroed, shifted, exchanged_inside)
OF_CHECKPOINTS = (deleted, swapped, extra, linked, of_another_kind, of_another_step)
OF_HASHED = (header_edited, header_exchanged, data_edited)
KINDS: dict[str, Kind] = {edit.__name__: of_any_file(edit) for edit in OF_BYTES}
KINDS |= {edit.__name__: edit for edit in (*OF_CHECKPOINTS, *OF_HASHED)}


# -- the check ---------------------------------------------------------------------------------------------------------


def outcome(path: Path) -> str:
    """Returns whether a damaged checkpoint is ``refused``, or ``harmless`` because it holds what was saved."""
    problem = verify(path).checkpoints[0].problem
    try:
        reader = open_newest(path, ALONE)
    except CheckpointError:
        assert problem is not None, "it verifies but is not loaded"
        return "refused"
    assert problem is None, f"it is loaded but does not verify: {problem}"
    assert_holds(reader, make_tensors(200))
    return "harmless"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("template")
    make_good(directory)
    return directory


def try_one(template: Path, name: str, seed: int) -> str:
    """Returns the outcome of one corruption of a copy; a run loads the newest good checkpoint and deletes none."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        directory = shutil.copytree(template, Path(folder) / "checkpoints")
        KINDS[name](directory / NEWEST, random.Random(seed))
        found = outcome(directory / NEWEST)
        reader = open_newest(directory, ALONE)
        assert reader.step == (100 if found == "refused" else 200)
        assert_holds(reader, make_tensors(reader.step))
        assert len(names_in(directory)) == 2
        return found


@FEW_AND_MANY
def test_random_corruption(template: Path, many: bool, faults: FaultCounts) -> None:
    count = faults.count(ci=45, full=1000) if many else 3
    for name in KINDS:
        first = zlib.crc32(name.encode()) + many
        found: Counter[str] = Counter()
        for seed in range(first, first + count):
            try:
                found[try_one(template, name, seed)] += 1
            except Exception as error:
                raise AssertionError(f"{name} with seed {seed}: {error}") from error
        assert found["refused"] >= 0.5 * count
        faults.passed("F5", count, seed=first, **found)
