"""Writing of one rank's data file; its shards are hashed and fingerprinted from memory during the write."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from dtrain.checkpoint import storage, threads
from dtrain.checkpoint.format import hashing
from dtrain.checkpoint.format.fingerprint import fingerprints, host_blocks
from dtrain.checkpoint.format.manifest import stored_shape
from dtrain.checkpoint.format.safetensors_file import dtype_name, encode_header
from dtrain.checkpoint.snapshot import TensorShard

_SMALL_BYTES = 4 << 20  # hashing and fingerprinting take a few ms up to this size; threads would not help

Result = TypeVar("Result")


@dataclass(frozen=True)
class WrittenShard:
    """A shard that was written: as ``TensorShard``, with its key in the file ("" if it has no elements)."""

    kind: str
    name: str
    dtype: str
    shape: list[int]
    start: int
    stop: int
    key: str
    fingerprint: int


@contextmanager
def new_file(path: Path) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Yields a function that appends to a new file; the file is synced when the block ends without an error."""
    descriptor = storage.create(path)
    try:
        yield lambda data: storage.write(descriptor, data)
        storage.sync(descriptor)  # before anything names the file as complete, see [Note: commit order]
    finally:
        storage.close(descriptor)


def _by_key(shards: Iterable[TensorShard]) -> dict[str, TensorShard]:
    """Returns the non-empty shards by key, wide dtypes first, so that every tensor in the file is aligned."""
    keyed: dict[str, TensorShard] = {}
    for shard in sorted(shards, key=lambda shard: -shard.dtype.itemsize):
        if shard.start < shard.stop:
            key = f"{shard.kind}:{shard.name}"
            while key in keyed:  # a rank may hold several intervals of a tensor, and safetensors keys are unique
                key += f"@{shard.start}"
            keyed[key] = shard
    return keyed


def write_shard_file(
    path: Path, shards: Iterable[TensorShard], raise_if_cancelled: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Writes and syncs a new file of ``shards``; returns plain JSON with the keys file, bytes, hash, digest and shards.

    The caller's thread writes. Two more threads hash and fingerprint the same memory; they have ended on return.
    ``raise_if_cancelled`` is called before each block and may raise to stop the write.

    Raises:
        OSError: the file cannot be written.
    """
    keyed = _by_key(shards)
    header = encode_header(
        [(key, shard.dtype, stored_shape(shard.shape, shard.stop - shard.start)) for key, shard in keyed.items()]
    )
    for device in {shard.device for shard in keyed.values() if shard.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()  # the two other threads copy on other streams
    name = hashing.preferred()
    digest = hashing.new_digest(name, header)
    sums = fingerprints((shard.data, shard.start) for shard in keyed.values())
    nbytes = sum(shard.nbytes for shard in keyed.values())
    run = in_background if nbytes > _SMALL_BYTES else on_demand
    with run(_hash(digest, keyed.values())) as wait_for_hash, run(sums) as wait_for_sums:
        with new_file(path) as append:
            append(header)
            for shard in keyed.values():
                for block in host_blocks(shard.data):
                    raise_if_cancelled()
                    append(block)
        wait_for_hash()
        written = [_report(*item, total) for item, total in zip(keyed.items(), wait_for_sums(), strict=True)]
    written += [_report("", shard, 0) for shard in shards if shard.start == shard.stop]
    size = len(header) + nbytes
    return {"file": path.name, "bytes": size, "hash": name, "digest": digest.hexdigest(), "shards": written}


@contextmanager
def on_demand(work: Iterable[Result]) -> Iterator[Callable[[], list[Result]]]:
    """Does the same as ``in_background``, but iterates in the calling thread when the function is called."""
    yield lambda: list(work)


@contextmanager
def in_background(work: Iterable[Result]) -> Iterator[Callable[[], list[Result]]]:
    """Iterates over ``work`` in a thread while the block runs; the thread ends with the block.

    Yields a function that waits for the iteration and returns its results or raises its error. If the block raises, the
    iteration stops after its next item.
    """
    thread = _IteratorThread(work)
    if not threads.start(thread):
        yield lambda: list(work)
        return
    try:
        yield thread.wait
    finally:
        thread.stop_requested.set()
        thread.join()


class _IteratorThread(threading.Thread, Generic[Result]):
    # not a concurrent.futures executor: those refuse work while the interpreter waits at exit for the last save

    def __init__(self, work: Iterable[Result]) -> None:
        super().__init__(name="dtrain-shard")
        self.stop_requested = threading.Event()
        self._work = work
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            for result in self._work:
                self._results.append(result)
                if self.stop_requested.is_set():
                    return
        except BaseException as error:
            self._error = error

    def wait(self) -> list[Result]:
        self.join()
        if self._error is not None:
            raise self._error
        return self._results


def _hash(digest: hashing.Digest, shards: Iterable[TensorShard]) -> Iterator[None]:
    for shard in shards:
        for block in host_blocks(shard.data):
            digest.update(block)
            yield


def _report(key: str, shard: TensorShard, fingerprint: int) -> dict[str, Any]:
    dtype = dtype_name(shard.dtype)
    return vars(
        WrittenShard(shard.kind, shard.name, dtype, list(shard.shape), shard.start, shard.stop, key, fingerprint)
    )
