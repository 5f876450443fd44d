"""Writes one token shard, see [Note: token shards]."""

from __future__ import annotations

import hashlib
import os
import zlib
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dtrain.data.shards.format import BLOCK, KINDS, ShardEntry, dtype_name, shard_file
from dtrain.errors import DataError

_WRITE_BYTES = 64 * BLOCK  # written at a time


@dataclass
class ShardWriter:
    """Collects the tokens of documents; memory stays bounded, save 8 bytes a document and 4 a block.

    Attributes:
        folder: of the shards.
        number: of this shard.
        vocab_size: tokens are below it.
        end_id: token that follows every document, or None.
        scratch: folder of the same file system for unfinished files.
        tokens: number of tokens so far.
        max_token: largest token so far.
    """

    folder: Path
    number: int
    vocab_size: int
    end_id: int | None
    scratch: Path
    tokens: int = 0
    max_token: int = -1
    _ends: array[int] = field(default_factory=lambda: array("Q"))
    _checksums: array[int] = field(default_factory=lambda: array("I"))
    _rest: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self._dtype = np.dtype(dtype_name(self.vocab_size)).newbyteorder("<")
        self._digest = hashlib.sha256()
        self._file: BinaryIO = self._unfinished("bin").open("wb")

    def _unfinished(self, kind: str) -> Path:
        # the process is in the name: one that outlives a killed command for a moment writes to no file of the next one
        return self.scratch / f"{self.number:05d}.{kind}.{os.getpid()}"

    def add(self, documents: Sequence[list[int]]) -> None:
        """Appends documents; raises ``DataError`` if a token is beyond the vocabulary."""
        if self.end_id is not None:
            for document in documents:
                document.append(self.end_id)
        count = self.tokens
        for document in documents:
            count += len(document)
            self._ends.append(count)
        ids = np.fromiter(chain.from_iterable(documents), np.int64, count - self.tokens)
        self.tokens = count
        self.max_token = max(self.max_token, int(ids.max(initial=-1)))
        if self.max_token >= self.vocab_size or ids.min(initial=0) < 0:
            raise DataError(
                f"the tokenizer gave the token {self.max_token}, which is beyond its vocabulary of {self.vocab_size}"
            )
        self._rest += ids.astype(self._dtype).data
        if len(self._rest) >= _WRITE_BYTES:
            self._write(len(self._rest) // BLOCK * BLOCK)

    def _write(self, num_bytes: int) -> None:
        data = bytes(self._rest[:num_bytes])
        del self._rest[:num_bytes]
        view = memoryview(data)
        self._checksums.extend(zlib.crc32(view[start : start + BLOCK]) for start in range(0, num_bytes, BLOCK))
        self._digest.update(data)
        self._file.write(data)

    def finish(self, sources: Sequence[str]) -> ShardEntry:
        """Writes the files to the disk, gives them their names, and returns their entry of the manifest."""
        self._write(len(self._rest))
        _sync(self._file)
        hashes = {"bin": self._digest.hexdigest()}
        for kind, values, dtype in (("ends", self._ends, "<u8"), ("crc", self._checksums, "<u4")):
            data = np.array(values, dtype=dtype).tobytes()
            hashes[kind] = hashlib.sha256(data).hexdigest()
            with self._unfinished(kind).open("wb") as file:
                file.write(data)
                _sync(file)
        for kind in KINDS:
            self._unfinished(kind).replace(shard_file(self.folder, self.number, kind))
        return ShardEntry(self.tokens, len(self._ends), self.max_token, hashes, tuple(sources))

    def close(self) -> None:
        """Removes what is unfinished."""
        self._file.close()
        for kind in KINDS:
            with suppress(OSError):
                self._unfinished(kind).unlink(missing_ok=True)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file so that after a crash it is there whole or not at all."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        file.write(data)
        _sync(file)
    unfinished.replace(path)
