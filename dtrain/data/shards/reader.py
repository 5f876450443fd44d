"""Reads the token shards of a folder as one stream of tokens."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from dtrain.data.shards.foreign import open_foreign
from dtrain.data.shards.format import BLOCK, KINDS, MANIFEST, ShardManifest, sha256_of, shard_file
from dtrain.data.shards.shard import Int64, Shard, allow_open_files, mapped
from dtrain.data.tokenizer import TOKENIZER
from dtrain.errors import ConfigError, DataError


class TokenShards:
    """The tokens of all shards of a folder, in order, memory-mapped.

    Attributes:
        num_tokens: of all shards.
        vocab_size: tokens are below it.
        end_id: token that ends a document, or None.
        document_ends: end of each document in the stream.
        fingerprint: sha256 (hex). Of the manifest, which holds hashes of all files; for shards of another program, of
            their names, sizes, indices and 64 blocks of each file.
        description: one line.
        tokenizer_sha256: of the ``tokenizer.json`` of the tokens, hex; None for shards of another program.
        tokenizer_file: that file, or None.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        vocab_size: int,
        end_id: int | None,
        fingerprint: str,
        tokenizer_sha256: str | None = None,
        tokenizer_file: Path | None = None,
    ) -> None:
        self.shards = tuple(shards)
        self._starts = np.concatenate(([0], np.cumsum([shard.num_tokens for shard in shards]))).astype(np.int64)
        self.num_tokens = int(self._starts[-1])
        self.vocab_size = vocab_size
        self.end_id = end_id
        self.document_ends = DocumentEnds([shard.ends for shard in shards], self._starts)
        self.fingerprint = fingerprint
        self.tokenizer_sha256 = tokenizer_sha256
        self.tokenizer_file = tokenizer_file
        files = f"{len(shards)} shard{'s' if len(shards) > 1 else ''}"
        self.description = f"{self.num_tokens:,} tokens, {self.num_documents:,} documents in {files}"

    @property
    def num_documents(self) -> int:
        return len(self.document_ends)

    @classmethod
    def open(cls, folder: Path, vocab_size: int | None = None) -> TokenShards:
        """Opens the shards that ``dtrain data tokenize`` has written, or those of llm.c or Megatron.

        Checks names, sizes, and the hashes of the small files. The tokens themselves are checked when they are first
        read, 64 KiB at a time, so that opening takes no time.

        Args:
            vocab_size: of shards of another program, which do not state it; else None.

        Raises:
            ConfigError: there is no such folder, no shard in it, or the vocabulary is missing or not needed.
            DataError: a file is missing, or is not what the manifest states.
        """
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is not a folder (working directory {os.getcwd()}); expected one of token shards"
            )
        is_own = (folder / MANIFEST).is_file()
        if is_own and vocab_size is not None:
            raise ConfigError(f"{folder / MANIFEST} states the vocabulary; remove data.vocab_size={vocab_size}")
        try:
            if is_own:
                return cls._open_own(folder)
            shards, fingerprint = open_foreign(folder, vocab_size)
        except OSError as error:
            hint = "; raise the hard limit of open files (ulimit -Hn)" if error.errno == errno.EMFILE else ""
            raise DataError(f"{error.filename or folder} cannot be read: {error.strerror}{hint}") from None
        assert vocab_size is not None
        return cls(shards, vocab_size=vocab_size, end_id=None, fingerprint=fingerprint)

    @classmethod
    def _open_own(cls, folder: Path) -> TokenShards:
        content = (folder / MANIFEST).read_bytes()
        manifest = ShardManifest.from_bytes(content, str(folder / MANIFEST))
        allow_open_files(2 * len(manifest.shards))
        tokenizer = folder / TOKENIZER
        if tokenizer.is_file() and sha256_of(tokenizer) != manifest.tokenizer_sha256:
            raise DataError(f"{tokenizer} is not the tokenizer of these shards, whose SHA-256 is in {MANIFEST}")
        return cls(
            [open_shard(folder, number, manifest) for number in range(len(manifest.shards))],
            vocab_size=manifest.vocab_size,
            end_id=manifest.end_id,
            fingerprint=hashlib.sha256(content).hexdigest(),
            tokenizer_sha256=manifest.tokenizer_sha256,
            tokenizer_file=tokenizer if tokenizer.is_file() else None,
        )

    def read(self, starts: Int64, length: int) -> Int64:
        """Returns int64 [n, length]: the tokens from each of ``starts`` [n], positions in the stream.

        Raises:
            DataError: a file is damaged.
        """
        out = np.empty((len(starts), length), dtype=np.int64)
        first = np.searchsorted(self._starts, starts, side="right") - 1
        last = np.searchsorted(self._starts, starts + (length - 1), side="right") - 1
        for number in np.unique(first[first == last]).tolist():
            rows = np.flatnonzero((first == number) & (last == number))
            out[rows] = self.shards[number].read_rows(starts[rows] - self._starts[number], length)
        for row in np.flatnonzero(first != last).tolist():
            self._read_across(int(starts[row]), out[row], range(int(first[row]), int(last[row]) + 1))
        return out

    def read_ranges(self, starts: Int64, lengths: Int64) -> Int64:
        """Returns the tokens of ranges of different lengths, one after another; raises as ``read``."""
        out = np.empty(int(lengths.sum()), dtype=np.int64)
        owners = np.searchsorted(self._starts, starts, side="right") - 1
        starts_in_shard = starts - self._starts[owners]
        is_plain = starts + lengths <= self._starts[owners + 1]
        for number in np.unique(owners).tolist():
            shard = self.shards[number]
            chosen = (owners == number) & is_plain
            if shard.checksums is None:
                is_plain[chosen] = False  # compared with the vocabulary row by row
            else:
                shard.check_blocks(starts_in_shard[chosen], lengths[chosen])
        place = 0
        # a loop: a slice copies several times faster than an array of indices
        for number, start, length, plain in zip(
            owners.tolist(), starts_in_shard.tolist(), lengths.tolist(), is_plain.tolist(), strict=True
        ):
            if plain:
                out[place : place + length] = self.shards[number].tokens[start : start + length]
            else:
                out[place : place + length] = self.read(np.array([start + self._starts[number]]), length)[0]
            place += length
        return out

    def _read_across(self, start: int, out: Int64, numbers: range) -> None:
        done = 0
        for number in numbers:
            at = start + done - int(self._starts[number])
            count = min(self.shards[number].num_tokens - at, len(out) - done)
            if count:  # shards may be empty
                out[done : done + count] = self.shards[number].read_rows(np.array([at]), count)[0]
            done += count


class DocumentEnds:
    """End of each document in the stream of all shards: ``ends[i]`` is exclusive, and the start of document i + 1."""

    def __init__(self, ends: Sequence[Int64], starts: Int64) -> None:
        self._ends = ends
        self._starts = starts
        self._first = np.concatenate(([0], np.cumsum([len(own) for own in ends]))).astype(np.int64)

    def __len__(self) -> int:
        return int(self._first[-1])

    @overload
    def __getitem__(self, key: int) -> int: ...

    @overload
    def __getitem__(self, key: slice) -> Int64: ...

    def __getitem__(self, key: int | slice) -> int | Int64:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            return self.take(np.arange(start, stop, step, dtype=np.int64))
        return int(self.take(np.array([range(len(self))[key]], dtype=np.int64))[0])

    def take(self, documents: Int64) -> Int64:
        """Returns the ends of these documents, by number."""
        out = np.empty(len(documents), dtype=np.int64)
        owners = np.searchsorted(self._first, documents, side="right") - 1
        for shard in np.unique(owners).tolist():
            chosen = owners == shard
            out[chosen] = self._ends[shard][documents[chosen] - self._first[shard]] + self._starts[shard]
        return out

    def search(self, positions: Int64) -> Int64:
        """Returns the number of the document that holds each position of the stream."""
        out = np.empty(len(positions), dtype=np.int64)
        owners = np.searchsorted(self._starts, positions, side="right") - 1
        for shard in np.unique(owners).tolist():
            chosen = owners == shard
            found = np.searchsorted(self._ends[shard], positions[chosen] - self._starts[shard], side="right")
            out[chosen] = self._first[shard] + found
        return out


def open_shard(folder: Path, number: int, manifest: ShardManifest) -> Shard:
    """Opens one shard of a manifest; raises ``DataError`` if its files are not those that were written."""
    entry, dtype = manifest.shards[number], manifest.numpy_dtype
    paths = {kind: shard_file(folder, number, kind) for kind in KINDS}
    num_bytes = entry.tokens * dtype.itemsize
    sizes = {"bin": num_bytes, "ends": 8 * entry.documents, "crc": 4 * num_blocks(num_bytes)}
    for kind, path in paths.items():
        try:
            found = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}; {MANIFEST} lists it") from None
        if found != sizes[kind]:
            raise DataError(f"{path} has {found} bytes; {MANIFEST} states {sizes[kind]}")
    for kind in ("ends", "crc"):
        if sha256_of(paths[kind]) != entry.sha256[kind]:
            raise DataError(f"{paths[kind]} is damaged: its SHA-256 is not the one in {MANIFEST}; restore it")
    # int64, which is what positions are: searching uint64 for int64 would convert the whole file
    ends = mapped(paths["ends"], np.dtype("<i8"), entry.documents)
    if (ends[-1] if entry.documents else 0) != entry.tokens:
        raise DataError(f"{paths['ends']}: the last document does not end with the shard's {entry.tokens} tokens")
    checksums: Any = np.fromfile(paths["crc"], np.dtype("<u4"))  # 64 bytes for each MiB of tokens
    return Shard(paths["bin"], dtype, 0, entry.tokens, ends, checksums, manifest.vocab_size)


def num_blocks(num_bytes: int) -> int:
    """Returns the number of checksums of a ``.bin`` of ``num_bytes``."""
    return -(-num_bytes // BLOCK)
