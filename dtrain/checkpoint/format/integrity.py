"""Checks of a checkpoint's files, all of which pass before any value is used.

Order: the manifest's own hash, its fields and the tiling of every tensor; the set of files and their sizes; each file's
header against the manifest; each file's hash; the fingerprint of every tensor from the files' bytes. A check that
fails raises a ``DamageError`` that names the file; a file that cannot be read raises an ``OSError``.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dtrain.checkpoint import threads
from dtrain.checkpoint.directory import STEP_NAME
from dtrain.checkpoint.format import manifest as manifests
from dtrain.checkpoint.format.checked_file import DamageError, open_regular, read_bytes, read_into
from dtrain.checkpoint.format.fingerprint import MASK, fingerprint_bytes
from dtrain.checkpoint.format.hashing import new_digest
from dtrain.checkpoint.format.manifest import FileEntry, Manifest
from dtrain.checkpoint.format.safetensors_file import StoredTensor, read_header

_READ_BYTES = 4 << 20
_THREAD_BYTES = 1 << 20  # blocks of this size are hashed in a thread; for smaller ones the hand-over costs as much

PartialSums = dict[int, int]  # index of a tensor in the manifest -> part of its fingerprint


def load_manifest(path: Path) -> Manifest:
    mode = os.lstat(path).st_mode
    if not stat.S_ISDIR(mode):
        raise DamageError(".", f"not a directory ({stat.filemode(mode)})", "not-a-directory")
    with open_regular(path / manifests.FILE) as (descriptor, size):
        if size > manifests.SIZE_LIMIT:
            raise DamageError(manifests.FILE, f"{size} bytes, more than {manifests.SIZE_LIMIT}", "size")
        manifest = Manifest.decode(read_bytes(descriptor, manifests.FILE, 0, size))
    match = STEP_NAME.fullmatch(path.name)
    if match and int(match[1]) != manifest.step:
        raise DamageError(manifests.FILE, f"is of step {manifest.step}, not of {path.name}", "other-step")
    return manifest


def check_files(path: Path, manifest: Manifest) -> None:
    """Checks that the directory holds exactly the manifest's files, with their sizes."""
    expected = {file.name for file in manifest.files} | {manifests.FILE}
    for name in sorted(os.listdir(path)):
        if name not in expected:
            raise DamageError(name, "not listed in the manifest", "extra-file")
    for file in manifest.files:
        with open_file(path, file):
            pass


@contextmanager
def open_file(path: Path, file: FileEntry) -> Iterator[int]:
    """Opens a data file, checks its size, and yields its descriptor."""
    with open_regular(path / file.name) as (descriptor, size):
        if size != file.bytes:
            raise DamageError(file.name, f"size differs (expected {file.bytes} bytes, got {size})", "size")
        yield descriptor


def read_stored_tensors(descriptor: int, manifest: Manifest, file: FileEntry) -> dict[str, StoredTensor]:
    """Reads the header of an open data file and checks it against the manifest."""
    stored = read_header(descriptor, file.name, file.bytes)
    listed = manifest.by_file[file.name]
    if stored.keys() != listed.keys():
        key = min(stored.keys() ^ listed.keys())
        where = "its header" if key in stored else "the manifest"
        raise DamageError(file.name, f"only {where} lists {key}", "header")
    # the hash proves the bytes; only this comparison proves that manifest and header cut them alike
    for key, (tensor, chunk) in listed.items():
        actual, shape = stored[key], manifests.stored_shape(tensor.shape, chunk.stop - chunk.start)
        if actual.dtype != tensor.dtype or actual.shape != shape:
            got = f"{actual.dtype} {list(actual.shape)}"
            raise DamageError(file.name, f"{key} is {got}, the manifest states {tensor.dtype} {list(shape)}", "header")
    return stored


def scan_file(
    path: Path,
    manifest: Manifest,
    file: FileEntry,
    *,
    fast: bool = False,
    before_block: Callable[[], None] = lambda: None,
) -> PartialSums:
    """Checks one data file and returns its part of the tensors' fingerprints; ``fast`` reads size and header only."""
    with open_file(path, file) as descriptor:
        stored = read_stored_tensors(descriptor, manifest, file)
        return {} if fast else _scan_data(descriptor, manifest, file, stored, before_block)


def _scan_data(
    descriptor: int,
    manifest: Manifest,
    file: FileEntry,
    stored: Mapping[str, StoredTensor],
    before_block: Callable[[], None],
) -> PartialSums:
    ordered = sorted(stored.items(), key=lambda item: item[1].begin)
    header = read_bytes(descriptor, file.name, 0, ordered[0][1].begin if ordered else file.bytes)
    position = {id(tensor): index for index, tensor in enumerate(manifest.tensors)}
    sums: PartialSums = {}
    with _Digest(file.hash, header) as digest:
        for key, location in ordered:
            tensor, chunk = manifest.by_file[file.name][key]
            itemsize, total = tensor.dtype.itemsize, 0
            for begin in range(location.begin, location.end, _READ_BYTES):
                before_block()
                block = digest.buffer(min(_READ_BYTES, location.end - begin))
                read_into(descriptor, file.name, begin, block)
                digest.update(block)
                total += fingerprint_bytes(block, itemsize, chunk.start + (begin - location.begin) // itemsize)
            index = position[id(tensor)]
            sums[index] = (sums.get(index, 0) + total) & MASK
        got = digest.hex()
    if got != file.digest:
        raise DamageError(file.name, f"{file.hash} differs (expected {file.digest}, got {got})", "hash")
    return sums


class _Digest:
    """Hashes large blocks in a thread while the caller fingerprints them and reads the next one."""

    def __init__(self, name: str, first: bytes) -> None:
        self._digest = new_digest(name, first)
        self._thread: threading.Thread | None = None
        self._buffers = [memoryview(b""), memoryview(b"")]

    def __enter__(self) -> _Digest:
        return self

    def __exit__(self, *error: object) -> None:
        self._wait()

    def buffer(self, count: int) -> memoryview:
        """Returns memory for the next block of ``count`` bytes; it is reused for the block after the next one."""
        self._buffers.reverse()
        if len(self._buffers[0]) < count:
            self._buffers[0] = memoryview(bytearray(count))
        return self._buffers[0][:count]

    def update(self, block: memoryview) -> None:
        """Hashes a block returned by ``buffer``; the block may still be read after this returns."""
        self._wait()
        if len(block) < _THREAD_BYTES:
            self._digest.update(block)
        else:
            thread = threading.Thread(target=self._digest.update, args=(block,))
            if threads.start(thread):
                self._thread = thread
            else:
                self._digest.update(block)

    def hex(self) -> str:
        self._wait()
        return self._digest.hexdigest()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()


def check_fingerprints(manifest: Manifest, parts: Iterable[PartialSums]) -> None:
    """Compares the sum of the parts with the manifest's fingerprint of every tensor."""
    totals = [0] * len(manifest.tensors)
    for part in parts:
        for index, value in part.items():
            totals[index] = (totals[index] + value) & MASK
    for tensor, total in zip(manifest.tensors, totals, strict=True):
        if total != tensor.fingerprint:
            reason = f"{tensor.label} has the fingerprint {total:016x} in the files, {tensor.fingerprint:016x} here"
            raise DamageError(manifests.FILE, reason, "fingerprint")


def verify_checkpoint(path: Path, *, fast: bool = False) -> Manifest:
    """Runs all checks of one checkpoint in this process; ``fast`` skips the data (hashes and fingerprints)."""
    manifest = load_manifest(path)
    check_contents(path, manifest, fast=fast)
    return manifest


def check_contents(path: Path, manifest: Manifest, *, fast: bool = False) -> None:
    """Runs the checks of ``verify_checkpoint`` that follow the manifest's."""
    check_files(path, manifest)
    parts = [scan_file(path, manifest, file, fast=fast) for file in manifest.files]
    if not fast:
        check_fingerprints(manifest, parts)
