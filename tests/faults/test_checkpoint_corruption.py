"""Random corruptions: each is refused or changes nothing that is loaded (F5).

``test_checkpoint_damage`` has chosen damages, of the set of files too, with the expected message of each.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import open_newest, verify
from dtrain.errors import CheckpointError
from tests.faults.test_checkpoint_damage import NEWEST, make_good, names_in
from tests.helpers.checkpoints import ALONE, assert_holds, make_tensors
from tests.helpers.damage import MANIFEST, R0, R1, change, header, sealed, vouched
from tests.helpers.fault_counts import FEW_AND_MANY, FaultCounts

Kind = Callable[[Path, random.Random], None]
Fields = dict[str, Any]


def interval(data: bytes | bytearray, rng: random.Random) -> slice:
    begin = rng.randrange(len(data))
    return slice(begin, min(begin + rng.choice((1, 8, 64, 512)), len(data)))


def flipped(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 9))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def truncated(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def extended(data: bytearray, rng: random.Random) -> None:
    data.extend(rng.choice((bytes(rng.randint(1, 600)), rng.randbytes(rng.randint(1, 600)), b"\n", data)))


def zeroed(data: bytearray, rng: random.Random) -> None:
    where = interval(data, rng)
    data[where] = bytes(len(data[where]))


def shifted(data: bytearray, rng: random.Random) -> None:
    where = interval(data, rng)
    data[where] = rng.choice((b"", 2 * data[where]))


def exchanged_inside(data: bytearray, rng: random.Random) -> None:
    size = rng.choice((1, 4, 64))
    one, other = (rng.randrange(len(data) - size) for _ in range(2))
    data[one : one + size], data[other : other + size] = data[other : other + size], data[one : one + size]


JUNK: list[Any] = [
    None, True, False, -1, -0.5, 2**63, 2**64, 10**30, -(10**300), 1 << 4000, "", "x", "NaN", "1", "../../etc/passwd",
    "\ud800\x1b[2J", [], {}, [1], {"a": 1}, [[]], [None] * 3, {"": {"": []}}, "9" * 4000,
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a JSON value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def at(manifest: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        manifest = manifest[key]
    return manifest


def replaced(manifest: Fields, rng: random.Random) -> None:
    path = rng.choice([*places(manifest)])
    old = at(manifest, path)
    at(manifest, path[:-1])[path[-1]] = rng.choice([new for new in JUNK if new != old])


def dropped(manifest: Fields, rng: random.Random) -> None:
    path = rng.choice([*places(manifest)])
    del at(manifest, path[:-1])[path[-1]]


def added(manifest: Fields, rng: random.Random) -> None:
    """Another field, or an item once more."""
    path = rng.choice([p for p in [(), *places(manifest)] if isinstance(at(manifest, p), dict | list)])
    parent = at(manifest, path)
    if isinstance(parent, dict):
        parent[rng.choice(["zz", "", "step", "__class__", "../x"])] = rng.choice(JUNK)
    else:
        parent.append(deepcopy(rng.choice(parent)) if parent else rng.choice(JUNK))


def exchanged(manifest: Fields, rng: random.Random) -> None:
    """Two items of a list, or one field of two items."""
    lists = [at(manifest, p) for p in places(manifest) if isinstance(at(manifest, p), list)]
    items = rng.choice([items for items in lists if len(items) > 1])
    one, other = rng.sample(range(len(items)), 2)
    if rng.random() < 0.5 and isinstance(items[one], dict):
        field = rng.choice([key for key in items[one] if key in items[other]])
        items[one][field], items[other][field] = items[other][field], items[one][field]
    else:
        items[one], items[other] = items[other], items[one]


def nudged(manifest: Fields, rng: random.Random) -> None:
    path = rng.choice([path for path in places(manifest) if type(at(manifest, path)) is int])
    at(manifest, path[:-1])[path[-1]] += rng.choice((-1, 1))


EDITS = (replaced, dropped, added, exchanged, nudged)


def of_any_file(edit: Callable[[bytearray, random.Random], Any]) -> Kind:
    return lambda path, rng: change(rng.choice((R0, R1, MANIFEST)), lambda data: edit(data, rng))(path)


def of_the_manifest(edit: Callable[[Fields, random.Random], None]) -> Kind:
    """All hashes are valid. The state and tensors without elements stay, because no file contradicts them."""

    def edit_the_rest(manifest: Fields, rng: random.Random) -> None:
        state, tensors = manifest.pop("state"), manifest["tensors"]
        empty = [tensors.pop(number) for number, tensor in enumerate(tensors) if not tensor["chunks"]]
        edit(manifest, rng)
        manifest["state"] = state
        if isinstance(manifest.get("tensors"), list):
            manifest["tensors"] += empty

    return lambda path, rng: sealed(lambda manifest: edit_the_rest(manifest, rng))(path)


def header_edited(path: Path, rng: random.Random) -> None:
    """All hashes are valid; header and manifest contradict each other."""
    header(lambda fields: rng.choice(EDITS)(fields, rng), rng.choice((R0, R1)))(path)


def data_edited(path: Path, rng: random.Random) -> None:
    """Only the fingerprints differ from the file's content."""

    def edit(data: bytes) -> bytes:
        begin = 8 + int.from_bytes(data[:8], "little")
        body = bytearray(data[begin:])
        rng.choice((flipped, zeroed, exchanged_inside))(body, rng)
        return data[:begin] + body

    vouched(rng.choice((R0, R1)), edit)(path)


OF_BYTES = (flipped, truncated, extended, zeroed, shifted, exchanged_inside)
KINDS: dict[str, Kind] = {edit.__name__: of_any_file(edit) for edit in OF_BYTES}
KINDS |= {edit.__name__: of_the_manifest(edit) for edit in EDITS}
KINDS |= {edit.__name__: edit for edit in (header_edited, data_edited)}


def try_one(template: Path, name: str, seed: int) -> bool:
    """Returns whether the corruption of a copy is refused; a run loads the newest good checkpoint and deletes none."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        directory = shutil.copytree(template, Path(folder) / "checkpoints")
        KINDS[name](directory / NEWEST, random.Random(seed))
        problem = verify(directory / NEWEST).checkpoints[0].problem
        if problem is not None:
            with pytest.raises(CheckpointError):
                open_newest(directory / NEWEST, ALONE)
        reader = open_newest(directory, ALONE)
        assert reader.step == (100 if problem else 200)
        assert len(names_in(directory)) == 2
        # nothing contradicts another shape of as many elements; an engine refuses it by the shape of its parameter
        unlike = any(entry.shape != make_tensors(200)[entry.kind, entry.name].shape for entry in reader.tensors)
        if not unlike:
            assert_holds(reader, make_tensors(reader.step))
        return problem is not None or unlike


@FEW_AND_MANY
def test_random_corruption(tmp_path: Path, many: bool, faults: FaultCounts) -> None:
    make_good(tmp_path)
    count = faults.count(ci=66, full=1000) if many else 4
    for name in KINDS:
        first = zlib.crc32(name.encode()) + many
        found: Counter[bool] = Counter()
        for seed in range(first, first + count):
            try:
                found[try_one(tmp_path, name, seed)] += 1
            except Exception as error:
                raise AssertionError(f"{name} with seed {seed}: {error}") from error
        assert found[True] >= 0.5 * count
        faults.passed("F5", count, seed=first, refused=found[True], harmless=found[False])
