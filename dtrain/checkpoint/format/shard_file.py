"""One rank's data file: its pieces, hashed and fingerprinted from memory while they are written."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from dtrain.checkpoint import storage
from dtrain.checkpoint.format.container import dtype_name, encode_header
from dtrain.checkpoint.format.fingerprint import fingerprints, host_blocks
from dtrain.checkpoint.format.manifest import stored_shape
from dtrain.checkpoint.snapshot import TensorShard

_SMALL_BYTES = 4 << 20  # hashed and fingerprinted in a few ms, which threads do not make faster

Result = TypeVar("Result")


@dataclass(frozen=True)
class Written:
    """Report of a written shard: as :class:`TensorShard`, with its key in the file ("" if it has no elements)."""

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
    """Gives a function that appends to a new file, which is durable when the block ends without an error."""
    descriptor = storage.create(path)
    try:
        yield lambda data: storage.write(descriptor, data)
        storage.sync(descriptor)
    finally:
        storage.close(descriptor)


def _keyed(pieces: Iterable[TensorShard]) -> dict[str, TensorShard]:
    """The pieces that have elements by their key in the file, wide dtypes first so that all lie aligned."""
    keyed: dict[str, TensorShard] = {}
    for piece in sorted(pieces, key=lambda piece: -piece.dtype.itemsize):
        if piece.start < piece.stop:
            key = f"{piece.kind}:{piece.name}"
            while key in keyed:
                key += f"@{piece.start}"
            keyed[key] = piece
    return keyed


def write_shard(
    path: Path, pieces: Iterable[TensorShard], proceed: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Writes a new file of ``pieces``, durable on return; what it reports is plain JSON: file, bytes, sha256, pieces.

    The caller's thread writes; two others hash and fingerprint the same memory meanwhile, and have ended on return.
    ``proceed`` is called before each block, and ends the writing by what it raises.

    Raises:
        OSError: what the file system says.
    """
    keyed = _keyed(pieces)
    header = encode_header(
        [(key, piece.dtype, stored_shape(piece.shape, piece.stop - piece.start)) for key, piece in keyed.items()]
    )
    for device in {piece.data.device for piece in keyed.values() if piece.data.is_cuda}:
        torch.cuda.current_stream(device).synchronize()  # the other two threads copy on other streams
    digest = hashlib.sha256(header)
    sums = fingerprints((piece.data, piece.start) for piece in keyed.values())
    nbytes = sum(piece.data.nbytes for piece in keyed.values())
    meanwhile = beside if nbytes > _SMALL_BYTES else after
    with meanwhile(_hash(digest, keyed.values())) as hashed, meanwhile(sums) as summed:
        with new_file(path) as append:
            append(header)
            for piece in keyed.values():
                for block in host_blocks(piece.data):
                    proceed()
                    append(block)
        hashed()
        written = [_report(*item, total) for item, total in zip(keyed.items(), summed(), strict=True)]
    written += [_report("", piece, 0) for piece in pieces if piece.start == piece.stop]
    return {"file": path.name, "bytes": len(header) + nbytes, "sha256": digest.hexdigest(), "pieces": written}


@contextmanager
def after(work: Iterable[Result]) -> Iterator[Callable[[], list[Result]]]:
    """As :func:`beside`, in the thread that asks and when it asks."""
    yield lambda: list(work)


@contextmanager
def beside(work: Iterable[Result]) -> Iterator[Callable[[], list[Result]]]:
    """Iterates over ``work`` in one more thread while the block runs; the thread ends with the block.

    Gives a function that waits for all that the work yields, and raises what it raised. Where the block raises, the
    work stops at what it yields next.
    """
    thread = _Thread(work)
    thread.start()
    try:
        yield thread.wait
    finally:
        thread.left.set()
        thread.join()


class _Thread(threading.Thread, Generic[Result]):
    # an executor of concurrent.futures takes no work while the interpreter waits for the last save at its end

    def __init__(self, work: Iterable[Result]) -> None:
        super().__init__(name="dtrain-shard")
        self.left = threading.Event()
        self._work = work
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            for result in self._work:
                self._results.append(result)
                if self.left.is_set():
                    return
        except BaseException as error:
            self._error = error

    def wait(self) -> list[Result]:
        self.join()
        if self._error is not None:
            raise self._error
        return self._results


def _hash(digest: hashlib._Hash, pieces: Iterable[TensorShard]) -> Iterator[None]:
    for piece in pieces:
        for block in host_blocks(piece.data):
            digest.update(block)
            yield


def _report(key: str, piece: TensorShard, fingerprint: int) -> dict[str, Any]:
    dtype = dtype_name(piece.dtype)
    return vars(Written(piece.kind, piece.name, dtype, list(piece.shape), piece.start, piece.stop, key, fingerprint))
