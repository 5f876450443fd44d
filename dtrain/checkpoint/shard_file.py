"""One rank's data file: its pieces, hashed and fingerprinted from memory while they are written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.checkpoint import storage
from dtrain.checkpoint.container import dtype_name, encode_header
from dtrain.checkpoint.fingerprint import MASK, fingerprint_bytes, host_blocks
from dtrain.checkpoint.manifest import stored_shape
from dtrain.checkpoint.snapshot import Piece


@dataclass(frozen=True)
class Written:
    """What a rank reports of a piece: as in :class:`Piece`, with the key in its file ("" where it has no elements)."""

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


def _keyed(pieces: Iterable[Piece]) -> dict[str, Piece]:
    """The pieces that have elements by their key in the file, wide dtypes first so that all lie aligned."""
    keyed: dict[str, Piece] = {}
    for piece in sorted(pieces, key=lambda piece: -piece.dtype.itemsize):
        if piece.start < piece.stop:
            key = f"{piece.kind}:{piece.name}"
            while key in keyed:
                key += f"@{piece.start}"
            keyed[key] = piece
    return keyed


def write_shard(path: Path, pieces: Iterable[Piece]) -> dict[str, Any]:
    """Writes a new file of ``pieces``, durable on return; what it reports is plain JSON: file, bytes, sha256, pieces.

    Raises:
        OSError: what the file system says.
    """
    keyed = _keyed(pieces)
    header = encode_header(
        [(key, piece.dtype, stored_shape(piece.shape, piece.stop - piece.start)) for key, piece in keyed.items()]
    )
    digest, size, written = hashlib.sha256(header), len(header), []
    with new_file(path) as append:
        append(header)
        for key, piece in keyed.items():
            total, index = 0, piece.start
            for block in host_blocks(piece.data):
                digest.update(block)  # of the memory, before it goes to the disk
                total += fingerprint_bytes(block, piece.dtype.itemsize, index)
                append(block)
                index += len(block) // piece.dtype.itemsize
                size += len(block)
            written.append(_report(piece, key, total & MASK))
    written += [_report(piece, "", 0) for piece in pieces if piece.start == piece.stop]
    return {"file": path.name, "bytes": size, "sha256": digest.hexdigest(), "pieces": written}


def _report(piece: Piece, key: str, fingerprint: int) -> dict[str, Any]:
    dtype = dtype_name(piece.dtype)
    return vars(Written(piece.kind, piece.name, dtype, list(piece.shape), piece.start, piece.stop, key, fingerprint))
