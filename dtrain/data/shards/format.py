"""Token shards on disk: names of the files, and the manifest.

[Note: token shards] A folder holds, for each shard N from 0:

- ``NNNNN.bin``: the tokens, little-endian uint16 (vocabularies up to 65,536) or uint32, without a header.
- ``NNNNN.ends``: uint64, the end of each document in this shard, in tokens from the shard's start.
- ``NNNNN.crc``: uint32, the CRC-32 of each 64 KiB of the ``.bin``, so that a reader checks what it reads.

Beside them are ``tokenizer.json`` and ``manifest.json``, which is written last: canonical JSON without times and
absolute paths, so that all bytes are a function of the input and the options.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.checkpoint.format.checked_file import DamageError, parse_json
from dtrain.errors import DataError

MANIFEST = "manifest.json"
FORMAT = "dtrain token shards"
VERSION = 1
BLOCK = 64 * 1024
_HASHED_BYTES = 1 << 24  # at once
"""Bytes of a ``.bin`` with one CRC-32."""
KINDS = ("bin", "ends", "crc")
MAX_SHARDS = 100_000  # of five digits

_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_UINT16_TOKENS = 1 << 16


@dataclass(frozen=True)
class ShardEntry:
    """One shard.

    Attributes:
        tokens: number of tokens.
        documents: number of documents.
        max_token: largest token; -1 without any.
        sha256: hex digest by kind of file: ``bin``, ``ends``, ``crc``.
        sources: the input files, or parts of them, that it was made of; for the reader of the manifest.
    """

    tokens: int
    documents: int
    max_token: int
    sha256: Mapping[str, str]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class ShardManifest:
    """Content of ``manifest.json``.

    Attributes:
        dtype: ``uint16`` or ``uint32``.
        vocab_size: tokens are below it.
        end_id: token that ends a document, or None.
        append_end: whether it follows every document.
        tokenizer_sha256: of the ``tokenizer.json``, hex.
        versions: of the programs that wrote it.
        shards: in order.
    """

    dtype: str
    vocab_size: int
    end_id: int | None
    append_end: bool
    tokenizer_sha256: str
    versions: Mapping[str, str]
    shards: tuple[ShardEntry, ...]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return _DTYPES[self.dtype]

    def to_bytes(self) -> bytes:
        """Returns canonical JSON, with the SHA-256 of what it is without that entry."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return _canonical_json({**content, "sha256": _digest(content)})

    @classmethod
    def from_bytes(cls, data: bytes, file: str) -> ShardManifest:
        """Parses and checks a manifest; raises ``DataError`` that names ``file``."""
        try:
            raw = parse_json(data, file)
        except DamageError as damage:
            raise DataError(f"{file}: {damage.reason}") from None
        if raw.get("format") != FORMAT or raw.get("version") != VERSION:
            raise DataError(
                f"{file}: format {raw.get('format')!r:.60}, version {raw.get('version')!r:.20}; expected {FORMAT!r}, "
                f"version {VERSION}"
            )
        fields = _Fields(raw, file)
        if fields.digest("sha256") != _digest({key: raw[key] for key in raw if key != "sha256"}):
            raise DataError(f"{file} is damaged: its content has another SHA-256 than it states; restore it")
        shards = fields.get("shards", list)
        if not 0 < len(shards) <= MAX_SHARDS:
            raise DataError(f"{file}: {len(shards)} shards; expected 1 to {MAX_SHARDS}")
        end_id = None if raw.get("end_id") is None else fields.count("end_id")
        manifest = cls(
            dtype=fields.get("dtype", str),
            vocab_size=fields.count("vocab_size"),
            end_id=end_id,
            append_end=fields.get("append_end", bool),
            tokenizer_sha256=fields.digest("tokenizer_sha256"),
            versions=fields.texts("versions"),
            shards=tuple(_shard(shard, f"{file}: shard {number}") for number, shard in enumerate(shards)),
        )
        if manifest.dtype not in _DTYPES:
            raise DataError(f"{file}: dtype {manifest.dtype!r:.40}; expected uint16 or uint32")
        largest = max(*(shard.max_token for shard in manifest.shards), end_id or 0)
        if largest >= manifest.vocab_size:
            raise DataError(f"{file}: token {largest} is beyond the vocabulary of {manifest.vocab_size}")
        return manifest


def _canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical_json(content)).hexdigest()


def dtype_name(vocab_size: int) -> str:
    """Returns the narrower dtype that holds every token of a vocabulary."""
    return "uint16" if vocab_size <= _UINT16_TOKENS else "uint32"


def shard_file(folder: Path, number: int, kind: str) -> Path:
    return folder / f"{number:05d}.{kind}"


def sha256_of(path: Path, on_progress: Callable[[], None] = lambda: None) -> str:
    """Returns the SHA-256 of a file, hex; ``on_progress`` is called for each part of it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_HASHED_BYTES):
            digest.update(part)
            on_progress()
    return digest.hexdigest()


class _Fields:
    """A JSON object of a manifest, whose entries are checked when they are read."""

    def __init__(self, raw: Any, where: str) -> None:
        if not isinstance(raw, dict):
            raise DataError(f"{where}: expected an object, got {raw!r:.60}")
        self._raw, self._where = raw, where

    def get(self, key: str, kind: type[Any]) -> Any:
        value = self._raw.get(key)
        if type(value) is not kind:
            raise DataError(f"{self._where}: {key} is {value!r:.60}; expected {kind.__name__}")
        return value

    def count(self, key: str, minimum: int = 0) -> int:
        value: int = self.get(key, int)
        if not minimum <= value < 1 << 62:
            raise DataError(f"{self._where}: {key} is {value}; expected a whole number from {minimum}")
        return value

    def digest(self, key: str) -> str:
        value: str = self.get(key, str)
        if len(value) != 64 or set(value) - set("0123456789abcdef"):
            raise DataError(f"{self._where}: {key} is {value!r:.80}; expected a SHA-256")
        return value

    def texts(self, key: str) -> dict[str, str]:
        values = self.get(key, dict)
        if not all(isinstance(value, str) for value in values.values()):
            raise DataError(f"{self._where}: {key} is {values!r:.80}; expected texts")
        return dict(values)


def _shard(raw: Any, where: str) -> ShardEntry:
    fields = _Fields(raw, where)
    hashes = _Fields(fields.get("sha256", dict), f"{where}: sha256")
    sources = fields.get("sources", list)
    if not all(isinstance(source, str) for source in sources):
        raise DataError(f"{where}: sources is {sources!r:.80}; expected texts")
    return ShardEntry(
        tokens=fields.count("tokens"),
        documents=fields.count("documents"),
        max_token=fields.count("max_token", minimum=-1),
        sha256={kind: hashes.digest(kind) for kind in KINDS},
        sources=tuple(sources),
    )
