"""Opens token shards of llm.c and Megatron by their headers.

Sources of the layouts: ``dev/data/data_common.py`` of llm.c (256 int32, then the tokens), and
``megatron/core/datasets/indexed_dataset.py`` of Megatron-LM (``.idx`` beside ``.bin``).
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.data.shards.format import BLOCK, MANIFEST
from dtrain.data.shards.shard import Int64, Shard, allow_open_files
from dtrain.errors import ConfigError, DataError

_LLMC_HEADER = 1024  # bytes
_LLMC_DTYPES: dict[int, np.dtype[Any]] = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, document indices
_MEGATRON_DTYPES: dict[int, np.dtype[Any]] = {
    4: np.dtype("<u4"),
    8: np.dtype("<u2"),
}  # code 4 is int32; a negative token is beyond all vocabularies
_SAMPLED_BLOCKS = 64


def open_foreign(folder: Path, vocab_size: int | None) -> tuple[list[Shard], str]:
    """Returns the shards of a folder, in the order of their names, and their fingerprint.

    Raises:
        ConfigError: it has no token shards, or the vocabulary is not given.
        DataError: a file is not what its header states.
    """
    indices = sorted(folder.glob("*.idx"))
    files = [path.with_suffix(".bin") for path in indices] if indices else sorted(folder.glob("*.bin"))
    if not files:
        raise ConfigError(
            f"{folder} has neither {MANIFEST} nor .bin files; write token shards with dtrain data tokenize"
        )
    if not indices and any((folder / f"{path.stem}.ends").exists() for path in files):
        raise ConfigError(
            f"{folder} has shards but no {MANIFEST}: dtrain data tokenize was interrupted; the same command finishes it"
        )
    if vocab_size is None:
        raise ConfigError(
            f"{folder} has no {MANIFEST}, and the headers of shards of llm.c and Megatron do not state the vocabulary; "
            "set data.vocab_size=N (50257 for GPT-2's tokenizer)"
        )
    allow_open_files(len(files))
    shards = [_megatron(path, vocab_size) for path in indices] or [_llmc(path, vocab_size) for path in files]
    digest = hashlib.sha256()
    for path in indices:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    for path in files:
        _sample(path, digest)
    return shards, digest.hexdigest()


def _llmc(path: Path, vocab_size: int) -> Shard:
    size = path.stat().st_size
    with path.open("rb") as file:
        header = np.frombuffer(file.read(12).ljust(12, b"\0"), dtype="<i4").tolist()
    dtype = _LLMC_DTYPES.get(header[0])
    if dtype is None or header[1] != 1:
        raise DataError(
            f"{path} begins with {header[0]}, {header[1]}; expected 20240520 or 20240801, and version 1, of a shard of "
            "llm.c. A file without a header states neither its dtype nor its documents: tokenize the text instead"
        )
    if size != _LLMC_HEADER + header[2] * dtype.itemsize:
        raise DataError(f"{path} has {size} bytes; its header states {header[2]} tokens of {dtype.itemsize} bytes")
    ends = np.array([header[2]] if header[2] else [], dtype=np.int64)  # the format has no documents
    return Shard(path, dtype, _LLMC_HEADER, header[2], ends, None, vocab_size)


def _megatron(index: Path, vocab_size: int) -> Shard:
    content = index.read_bytes()
    magic, version, code, sequences, documents = _MEGATRON_HEADER.unpack_from(
        content.ljust(_MEGATRON_HEADER.size, b"\0")
    )
    if magic != _MEGATRON or version != 1:
        raise DataError(
            f"{index} begins with {magic!r}, version {version}; expected {_MEGATRON!r}, version 1, of Megatron"
        )
    if code not in _MEGATRON_DTYPES:
        raise DataError(f"{index}: the code of its dtype is {code}; supported are 4 (int32) and 8 (uint16)")
    dtype = _MEGATRON_DTYPES[code]
    expected = _MEGATRON_HEADER.size + 12 * sequences + 8 * documents
    if len(content) != expected:
        raise DataError(f"{index} has {len(content)} bytes; its header states {expected}")
    lengths = _array(content, "<i4", sequences, _MEGATRON_HEADER.size)
    pointers = _array(content, "<i8", sequences, _MEGATRON_HEADER.size + 4 * sequences)
    borders = _array(content, "<i8", documents, _MEGATRON_HEADER.size + 12 * sequences)
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    if (lengths < 0).any() or (pointers != starts[:-1] * dtype.itemsize).any():
        raise DataError(f"{index}: its sequences do not lie one behind the other, which is not supported")
    if not documents or borders[0] != 0 or borders[-1] != sequences or (np.diff(borders) < 0).any():
        raise DataError(f"{index}: its documents do not cover its {sequences} sequences in order")
    path, num_tokens = index.with_suffix(".bin"), int(starts[-1])
    if not path.is_file() or path.stat().st_size != num_tokens * dtype.itemsize:
        found = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
        raise DataError(f"{path}: {found}; {index.name} states {num_tokens} tokens of {dtype.itemsize} bytes")
    ends: Int64 = np.unique(starts[borders[1:]])
    return Shard(path, dtype, 0, num_tokens, ends[ends > 0], None, vocab_size)


def _array(content: bytes, dtype: str, count: int, offset: int) -> Int64:
    return np.frombuffer(content, dtype=dtype, count=count, offset=offset).astype(np.int64)


def _sample(path: Path, digest: Any) -> None:
    """Adds a file's name, size and evenly spaced blocks to a digest; small files whole."""
    size = path.stat().st_size
    digest.update(f"{len(path.name)}:{path.name}:{size}:".encode())
    with path.open("rb") as file:
        for start in sorted(
            {size * number // _SAMPLED_BLOCKS for number in range(_SAMPLED_BLOCKS)} | {max(0, size - BLOCK)}
        ):
            file.seek(start)
            digest.update(file.read(BLOCK))
