"""One file of tokens, memory-mapped, whose blocks are checked when they are first read."""

from __future__ import annotations

import mmap
import resource
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.data.shards.format import BLOCK
from dtrain.errors import DataError

Int64 = NDArray[np.int64]


@dataclass(eq=False)
class Shard:
    """The tokens of one file.

    Attributes:
        path: the file.
        dtype: of its tokens, little-endian.
        offset: bytes before the first token.
        num_tokens: number of tokens.
        ends: end of each document, in tokens from the shard's start.
        checksums: CRC-32 of each 64 KiB after ``offset``; None if there are none, and then every read is compared with
            the vocabulary instead.
        vocab_size: tokens are below it.
    """

    path: Path
    dtype: np.dtype[Any]
    offset: int
    num_tokens: int
    ends: Int64
    checksums: NDArray[np.uint32] | None
    vocab_size: int
    tokens: NDArray[Any] = field(init=False, repr=False)
    _checked: NDArray[np.bool_] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.tokens = mapped(self.path, self.dtype, self.num_tokens, self.offset)
        self._checked = np.zeros(-(-self.num_tokens * self.dtype.itemsize // BLOCK), dtype=bool)

    def read_rows(self, starts: Int64, length: int) -> NDArray[Any]:
        """Returns the ``length`` tokens from each of ``starts``, all of them inside this shard.

        Raises:
            DataError: a block has another checksum than when it was written, or a token is beyond the vocabulary.
        """
        if self.checksums is not None:
            self.check_blocks(starts, length)
        rows: NDArray[Any] = np.lib.stride_tricks.sliding_window_view(self.tokens, length)[starts]
        if self.checksums is None and rows.size and int(rows.max()) >= self.vocab_size:
            row, column = np.argwhere(rows >= self.vocab_size)[0].tolist()
            raise DataError(
                f"{self.path}: token {rows[row, column]} at position {starts[row] + column} is beyond the vocabulary "
                f"of {self.vocab_size}; the shards are of another tokenizer"
            )
        return rows

    def check_blocks(self, starts: Int64, length: int | Int64) -> None:
        """Checks the blocks of ranges that have not been read before; raises as ``check_block``."""
        size = self.dtype.itemsize
        first, last = starts * size // BLOCK, ((starts + length) * size - 1) // BLOCK
        for step in range(int((last - first).max(initial=-1)) + 1):
            blocks = np.minimum(first + step, last)
            for block in np.unique(blocks[~self._checked[blocks]]).tolist():
                self.check_block(block)
                self._checked[block] = True

    def check_block(self, block: int) -> None:
        """Raises ``DataError`` if the bytes of a block are not those that were written."""
        assert self.checksums is not None
        try:
            with self.path.open("rb", buffering=0) as file:  # one read, where the map would fault page by page
                file.seek(self.offset + block * BLOCK)
                found = zlib.crc32(file.read(BLOCK))
        except OSError as error:
            raise DataError(f"{self.path} cannot be read any more: {error.strerror}") from None
        if found != self.checksums[block]:
            start = block * BLOCK
            stop = min(start + BLOCK, self.num_tokens * self.dtype.itemsize)
            raise DataError(
                f"{self.path}: bytes {start} to {stop} have the CRC-32 {found:08x}; {self.checksums[block]:08x} was "
                "written. Restore the file, or tokenize again; dtrain data verify checks all files"
            )


def allow_open_files(count: int) -> None:
    """Raises this process's limit of open files by ``count``, up to its hard limit: each map keeps its file open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        most = soft + count if hard == resource.RLIM_INFINITY else min(soft + count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def mapped(path: Path, dtype: np.dtype[Any], count: int, offset: int = 0) -> NDArray[Any]:
    """Returns ``count`` elements of a file as a read-only map, which takes no memory of the process."""
    if not count:  # an empty map is an error
        return np.empty(0, dtype)
    values = np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))
    # samples are read in random order: reading ahead would fetch megabytes for each
    values._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    return np.asarray(values)
