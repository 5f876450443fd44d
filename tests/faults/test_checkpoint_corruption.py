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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import open_newest, verify
from dtrain.errors import CheckpointError
from tests.helpers.checkpoints import ALONE, assert_holds, make_tensors, save_good
from tests.helpers.damage import MANIFEST, R0, R1, change, header, sealed, vouched
from tests.helpers.fault_counts import FaultCounts

FILES = (R0, R1, MANIFEST)
GOOD, NEWEST = "step-00000100", "step-00000200"
Kind = Callable[[Path, random.Random], None]
KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    """Registers a function that damages the checkpoint at a path in ``KINDS``."""
    KINDS[function.__name__] = function
    return function


def interval(data: bytes | bytearray, rng: random.Random) -> tuple[int, int]:
    begin = rng.randrange(len(data))
    return begin, min(begin + rng.choice((1, 8, 64, 512)), len(data))


def edit_bytes(edit: Callable[[bytearray, random.Random], Any]) -> Kind:
    def apply(path: Path, rng: random.Random) -> None:
        change(rng.choice(FILES), lambda data: edit(data, rng))(path)

    apply.__name__ = edit.__name__
    return apply


# -- bytes of a file, without its hashes -------------------------------------------------------------------------------


@kind
@edit_bytes
def flipped(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 9))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


@kind
@edit_bytes
def truncated(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


@kind
@edit_bytes
def extended(data: bytearray, rng: random.Random) -> None:
    data.extend(rng.choice((bytes(rng.randint(1, 600)), rng.randbytes(rng.randint(1, 600)), b"\n", data)))


@kind
@edit_bytes
def zeroed(data: bytearray, rng: random.Random) -> None:
    begin, end = interval(data, rng)
    data[begin:end] = bytes(end - begin)


@kind
@edit_bytes
def shifted(data: bytearray, rng: random.Random) -> None:
    begin, end = interval(data, rng)
    if rng.random() < 0.5:
        data[begin:begin] = data[begin:end]
    else:
        del data[begin:end]


@kind
@edit_bytes
def exchanged_inside(data: bytearray, rng: random.Random) -> None:
    size = rng.choice((1, 4, 64))
    one, other = (rng.randrange(len(data) - size) for _ in range(2))
    data[one : one + size], data[other : other + size] = data[other : other + size], data[one : one + size]


# -- files of a checkpoint ---------------------------------------------------------------------------------------------


@kind
def deleted(path: Path, rng: random.Random) -> None:
    for file in rng.sample(FILES, rng.randint(1, 3)):
        (path / file).unlink()


@kind
def swapped(path: Path, rng: random.Random) -> None:
    one, other = rng.sample(FILES, 2)
    if rng.random() < 0.5:
        shutil.copy(path / one, path / other)
        return
    (path / one).rename(path / "x")
    (path / other).rename(path / one)
    (path / "x").rename(path / other)


@kind
def extra(path: Path, rng: random.Random) -> None:
    stem = "".join(rng.choices("ab01-._ é", k=rng.randint(1, 8)))
    name = stem.strip(".") + rng.choice(("", ".safetensors", ".json", ".pkl", ".tmp"))
    if rng.random() < 0.2:
        (path / f"x{name}").mkdir()
    else:
        (path / f"x{name}").write_bytes(rng.choice((b"", (path / R0).read_bytes(), b"\x80\x04N.")))


@kind
def linked(path: Path, rng: random.Random) -> None:
    file = path / rng.choice(FILES)
    elsewhere = path.parent / f"elsewhere-{rng.randrange(10**9)}"
    target = rng.choice((elsewhere, path.parent / GOOD / file.name, Path("/dev/zero"), path / "nothing"))
    file.rename(elsewhere)
    file.symlink_to(target)


@kind
def of_another_kind(path: Path, rng: random.Random) -> None:
    file = path / rng.choice(FILES)
    file.unlink()
    rng.choice((Path.mkdir, os.mkfifo))(file)


@kind
def of_another_step(path: Path, rng: random.Random) -> None:
    files = rng.sample(FILES, rng.randint(1, 3))
    for file in files:
        shutil.copy(path.parent / GOOD / file, path / file)


# -- with valid hashes -------------------------------------------------------------------------------------------------

NUMBERS = (0, 1, -1, 7, 2**31, 2**53, 2**63, 2**64, 10**30, 0.5, 1e300, True, None, "1", [], {})
TEXTS = (
    "",
    " ",
    "F16",
    "I32",
    "BOOL",
    "master",
    "exp_avg",
    "weight",
    "..",
    "/",
    "r0000.safetensors",
    "\0",
    "\ud800",
    "é",
)


def paths(value: Any, inside: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every value in a JSON value."""
    if inside:
        yield inside
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths(item, (*inside, key))


def mutate(root: Any, rng: random.Random, *, but: str = "") -> None:
    """Changes one value in a JSON value, except below the key ``but``; sometimes exchanges two of the same key."""
    everywhere = [path for path in paths(root) if path[0] != but]
    path = rng.choice(everywhere)
    alike = [other for other in everywhere if other[-1] == path[-1] and len(other) == len(path) and other != path]
    container, old = parent(root, path), parent(root, path)[path[-1]]
    if alike and rng.random() < 0.3:
        other = rng.choice(alike)
        container[path[-1]], parent(root, other)[other[-1]] = parent(root, other)[other[-1]], old
    elif rng.random() < 0.15:
        if isinstance(container, list):
            rng.choice(
                (lambda: container.pop(path[-1]), lambda: container.append(old), lambda: rng.shuffle(container))
            )()
        else:
            del container[path[-1]]
            container.update({rng.choice(TEXTS): old} if rng.random() < 0.5 else {})
    elif isinstance(old, int) and rng.random() < 0.7:
        container[path[-1]] = rng.choice((old + 1, old - 1, old * 2, old // 2, -old, old + rng.randrange(64)))
    elif isinstance(old, str) and old and rng.random() < 0.7:
        index = rng.randrange(len(old))
        container[path[-1]] = old[:index] + rng.choice("0af@:-.zZ ") + old[index + rng.randrange(2) :]
    else:
        container[path[-1]] = rng.choice(NUMBERS + TEXTS)


def parent(root: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        root = root[key]
    return root


@kind
def manifest_edited(path: Path, rng: random.Random) -> None:
    """The state is left alone, because no second copy of it exists."""
    sealed(lambda manifest: mutate(manifest, rng, but="state"))(path)


@kind
def manifest_edited_twice(path: Path, rng: random.Random) -> None:
    sealed(lambda manifest: [mutate(manifest[group], rng) for group in ("tensors", "files") if manifest[group]])(path)


@kind
def header_edited(path: Path, rng: random.Random) -> None:
    header(lambda fields: mutate(fields, rng), rng.choice((R0, R1)))(path)


@kind
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


@kind
def data_edited(path: Path, rng: random.Random) -> None:
    """Only the fingerprints differ from the file's content."""

    def edit(data: bytes) -> bytes:
        begin = 8 + int.from_bytes(data[:8], "little")
        body = bytearray(data[begin:])
        rng.choice((flipped_body, zeroed_body, exchanged_body))(body, rng)
        return data[:begin] + body

    vouched(rng.choice((R0, R1)), edit)(path)


def flipped_body(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def zeroed_body(data: bytearray, rng: random.Random) -> None:
    begin, end = interval(data, rng)
    data[begin:end] = bytes(end - begin)


def exchanged_body(data: bytearray, rng: random.Random) -> None:
    one, other = (4 * rng.randrange(len(data) // 4) for _ in range(2))
    data[one : one + 4], data[other : other + 4] = data[other : other + 4], data[one : one + 4]


# -- the check ---------------------------------------------------------------------------------------------------------


def outcome(path: Path) -> str:
    """Returns the result for a damaged checkpoint: ``refused``, ``harmless``, or ``unlike``.

    An ``unlike`` one has other names, dtypes or shapes, which engines refuse before they overwrite anything.
    """
    problem = verify(path).checkpoints[0].problem
    try:
        reader = open_newest(path, ALONE)
    except CheckpointError:
        assert problem is not None, "it verifies but is not loaded"
        return "refused"
    assert problem is None, f"it is loaded but does not verify: {problem}"
    expected = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in make_tensors(200).items()}
    if {(entry.kind, entry.name): (entry.dtype, entry.shape) for entry in reader.tensors} != expected:
        return "unlike"
    assert_holds(reader, make_tensors(200))
    return "harmless"


def assert_run_resumes(directory: Path, newest: int) -> None:
    """The run loads the newest good checkpoint, and a damaged one is renamed, not deleted."""
    reader = open_newest(directory, ALONE)
    assert reader.step == newest
    assert_holds(reader, make_tensors(newest))
    assert len([path for path in directory.iterdir() if "step-" in path.name]) == 2


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("template")
    for step in (100, 200):
        save_good(directory, step)
    return directory


def try_one(template: Path, name: str, seed: int) -> str:
    """Returns the outcome of one corruption of a copy."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        directory = Path(folder) / "checkpoints"
        shutil.copytree(template, directory)
        KINDS[name](directory / NEWEST, random.Random(seed))
        found = outcome(directory / NEWEST)
        if found != "unlike":
            assert_run_resumes(directory, 100 if found == "refused" else 200)
        return found


@pytest.mark.parametrize("name", KINDS)
def test_random_corruption(template: Path, name: str, faults: FaultCounts) -> None:
    count = faults.count(ci=9, full=1000)
    first = zlib.crc32(name.encode())
    found: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            found[try_one(template, name, seed)] += 1
        except Exception as error:
            raise AssertionError(f"{name} with seed {seed}: {error}") from error
    assert found["refused"] > 0.5 * count
    assert found["unlike"] < 0.1 * count
    faults.passed("F5", count, seed=first, **found)
