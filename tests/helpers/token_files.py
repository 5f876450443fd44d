"""Token shards written from arrays, independently of the tool that tokenizes."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dtrain.data.shards.format import BLOCK, MANIFEST, ShardEntry, ShardManifest, dtype_name


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
        contents = {
            "bin": data,
            "ends": np.cumsum([len(document) for document in documents], dtype=np.uint64).tobytes(),
            "crc": np.array(
                [zlib.crc32(data[start : start + BLOCK]) for start in range(0, len(data), BLOCK)], dtype="<u4"
            ).tobytes(),
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
