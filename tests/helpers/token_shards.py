"""Token shards in memory, with the interface of those in files, and small ones in files."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.data.packing import pack_documents, write_plan
from dtrain.data.shards.format import BLOCK, MANIFEST, ShardEntry, ShardManifest, dtype_name
from dtrain.data.shards.reader import TokenShards

Int64 = NDArray[np.int64]


class Ends(np.ndarray[Any, np.dtype[np.int64]]):
    """Ends of documents in the stream of tokens."""

    def search(self, positions: Int64) -> Int64:
        return np.searchsorted(self, positions, side="right").astype(np.int64)


class MemoryShards:
    """Documents of these lengths; each token is its own number in the stream, plus 1."""

    end_id = 0
    vocab_size = 70_000
    tokenizer_sha256: str | None = None
    tokenizer_file: Path | None = None

    def __init__(self, lengths: list[int] | Int64, **attributes: Any) -> None:
        vars(self).update(attributes)
        self.fingerprint = hashlib.sha256(np.asarray(lengths, np.int64).tobytes()).hexdigest()
        self.document_ends = np.cumsum(np.asarray(lengths, np.int64)).view(Ends)
        self.num_documents = len(self.document_ends)
        self.num_tokens = int(self.document_ends[-1])
        self.stream = np.arange(1, self.num_tokens + 1).astype(np.uint16)

    def read(self, starts: Int64, length: int) -> Int64:
        assert starts.min() >= 0
        assert starts.max() + length <= self.num_tokens
        return self.stream[starts[:, None] + np.arange(length)].astype(np.int64)

    def read_ranges(self, starts: Int64, lengths: Int64) -> Int64:
        ranges = zip(starts.tolist(), lengths.tolist(), strict=True)
        return np.concatenate([self.stream[start : start + length] for start, length in ranges]).astype(np.int64)


def write_packed_shards(folder: Path, lengths: list[int], seq_len: int) -> Path:
    """Writes two shards of random tokens in documents of these lengths, and the plan for samples of ``seq_len``."""
    draw = np.random.default_rng(0)
    documents = [draw.integers(1, 97, length) for length in lengths]
    half = len(documents) // 2
    write_shards(folder, [documents[:half], documents[half:]], vocab_size=97)
    shards = TokenShards.open(folder)
    write_plan(folder, pack_documents(shards.document_ends[:], seq_len), seq_len, shards.fingerprint)
    return folder


def write_shards(
    folder: Path, shards: Sequence[Sequence[np.ndarray]], vocab_size: int, end_id: int | None = None
) -> None:
    """Writes each list of documents, arrays of tokens, as one shard."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text("{}")
    dtype = dtype_name(vocab_size)
    entries = []
    for number, documents in enumerate(shards):
        tokens = np.concatenate([np.empty(0, np.int64), *documents])
        data = tokens.astype(dtype).tobytes()
        blocks = (data[start : start + BLOCK] for start in range(0, len(data), BLOCK))
        contents = {
            "bin": data,
            "ends": np.cumsum([len(document) for document in documents], dtype=np.uint64).tobytes(),
            "crc": np.array([zlib.crc32(block) for block in blocks], dtype="<u4").tobytes(),
        }
        for kind, content in contents.items():
            (folder / f"{number:05d}.{kind}").write_bytes(content)
        hashes = {kind: hashlib.sha256(content).hexdigest() for kind, content in contents.items()}
        largest = int(tokens.max(initial=-1))
        entries.append(ShardEntry(len(tokens), len(documents), largest, hashes, (f"part {number}",)))
    digest = hashlib.sha256(b"{}").hexdigest()
    manifest = ShardManifest(dtype, vocab_size, end_id, end_id is not None, digest, {"dtrain": "test"}, tuple(entries))
    (folder / MANIFEST).write_bytes(manifest.to_bytes())


def rewrite_manifest(folder: Path, text: str) -> None:
    """Writes a manifest with the SHA-256 of its content, if it is JSON."""
    try:
        content = json.loads(text)
    except ValueError:
        (folder / MANIFEST).write_text(text)
        return
    content.pop("sha256")
    content["sha256"] = hashlib.sha256(_canonical(content)).hexdigest()
    (folder / MANIFEST).write_bytes(_canonical(content))


def _canonical(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
