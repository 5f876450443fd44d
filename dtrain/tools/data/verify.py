"""``dtrain data verify``: reads every byte of a folder of token shards."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dtrain.data.packing import read_plan
from dtrain.data.shards.format import BLOCK, KINDS, MANIFEST, ShardManifest, sha256_of, shard_file
from dtrain.data.shards.reader import TokenShards, num_blocks
from dtrain.data.tokenizer import TOKENIZER
from dtrain.errors import ConfigError, DataError
from dtrain.tools.data.info import packed_lengths
from dtrain.tools.data.progress import WorkProgress
from dtrain.tools.tables import plural

_READ_BYTES = 64 * BLOCK


def run(values: Mapping[str, Any]) -> int:
    """Prints a line for each bad file; returns 1 if there is one."""
    folder: Path = values["folder"]
    if not (folder / MANIFEST).is_file():
        return _verify_foreign(folder, values["vocab_size"])
    content = (folder / MANIFEST).read_bytes()
    try:
        manifest = ShardManifest.from_bytes(content, str(folder / MANIFEST))
    except DataError as error:
        print(f"BAD {error}")
        return 1
    num_bad = 0
    total = sum(shard.tokens * manifest.numpy_dtype.itemsize for shard in manifest.shards)
    with WorkProgress("verify", total) as progress:
        for problem in problems(folder, manifest, progress):
            print(f"BAD {problem}", flush=True)
            num_bad += 1
    for seq_len in packed_lengths(folder):
        try:
            read_plan(folder, seq_len, hashlib.sha256(content).hexdigest())
        except ConfigError as error:
            print(f"BAD {error}")
            num_bad += 1
    if num_bad:
        return 1
    tokens = sum(shard.tokens for shard in manifest.shards)
    print(f"ok  {folder}: {plural(len(manifest.shards), 'shard')}, {tokens:,} tokens, {total:,} bytes of tokens read")
    return 0


def _verify_foreign(folder: Path, vocab_size: int | None) -> int:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; expected one of token shards")
    if vocab_size is None:
        raise ConfigError(
            f"{folder} has no {MANIFEST}; if these are shards of llm.c or Megatron, set vocab_size=N to check their "
            "tokens. An interrupted dtrain data tokenize is finished by the same command"
        )
    num_bad = 0
    shards = TokenShards.open(folder, vocab_size)
    with WorkProgress("verify", sum(shard.tokens.nbytes for shard in shards.shards)) as progress:
        for shard in shards.shards:
            for start in range(0, shard.num_tokens, _READ_BYTES):
                tokens = shard.tokens[start : start + _READ_BYTES]
                if int(tokens.max()) >= vocab_size:
                    at = int(np.argmax(tokens >= vocab_size))
                    print(f"BAD {shard.path}: token {tokens[at]} at position {start + at} is not below {vocab_size}")
                    num_bad += 1
                    break
                progress.finished(tokens.nbytes)
    if not num_bad:
        print(f"ok  {folder}: {shards.description}; sizes, headers and tokens, because the format has no checksums")
    return 1 if num_bad else 0


def problems(folder: Path, manifest: ShardManifest, progress: WorkProgress) -> Iterator[str]:
    """Yields the file and what is wrong with it, for each bad file."""
    tokenizer = folder / TOKENIZER
    if not tokenizer.is_file():
        yield f"{tokenizer}: missing"
    elif sha256_of(tokenizer) != manifest.tokenizer_sha256:
        yield f"{tokenizer}: its SHA-256 is not the one in {MANIFEST}"
    for number, entry in enumerate(manifest.shards):
        num_bytes = entry.tokens * manifest.numpy_dtype.itemsize
        sizes = {"bin": num_bytes, "ends": 8 * entry.documents, "crc": 4 * num_blocks(num_bytes)}
        contents: dict[str, bytes] = {}
        for kind in KINDS[1:]:
            path = shard_file(folder, number, kind)
            problem = _problem(path, sizes[kind])
            if problem is None:
                data = path.read_bytes()
                if hashlib.sha256(data).hexdigest() == entry.sha256[kind]:
                    contents[kind] = data
                else:
                    problem = f"{path}: its SHA-256 is not the one in {MANIFEST}"
                    problem += _first_bad_end(data, entry.tokens) if kind == "ends" else ""
            if problem is not None:
                yield problem
        path = shard_file(folder, number, "bin")
        problem = _problem(path, num_bytes) or _bad_block(
            path, manifest, entry.sha256["bin"], contents.get("crc"), progress
        )
        if problem is not None:
            yield problem
        if "ends" in contents and (order := _first_bad_end(contents["ends"], entry.tokens)):
            yield f"{shard_file(folder, number, 'ends')}: written wrongly{order}"


def _problem(path: Path, size: int) -> str | None:
    try:
        found = path.stat().st_size
        with path.open("rb"):
            pass
    except FileNotFoundError:
        return f"{path}: missing"
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None if found == size else f"{path}: {found} bytes; {MANIFEST} states {size}"


def _first_bad_end(data: bytes, num_tokens: int) -> str:
    """Returns the first end that cannot be, as the rest of a message, or nothing."""
    ends = np.frombuffer(data, dtype="<u8")
    before = np.concatenate((np.zeros(1, ends.dtype), ends[:-1]))
    bad = np.flatnonzero((ends <= before) | (ends > num_tokens))
    if len(bad):
        place = int(bad[0])
        return f"; document {place} ends at {ends[place]} of {num_tokens}, after {before[place]} (offset {8 * place})"
    if len(ends) and ends[-1] != num_tokens:
        return f"; the last document ends at {ends[-1]} of {num_tokens}"
    return ""


def _bad_block(
    path: Path, manifest: ShardManifest, digest: str, crc: bytes | None, progress: WorkProgress
) -> str | None:
    """Reads a whole ``.bin``; returns what is wrong with it, by its checksums and by the largest token."""
    found = hashlib.sha256()
    checksums = None if crc is None else np.frombuffer(crc, dtype="<u4")
    bad_block, bad_token = None, None
    with path.open("rb") as file:
        for start, data in _chunks(file):
            found.update(data)
            tokens = np.frombuffer(data, dtype=manifest.numpy_dtype)
            if bad_token is None and int(tokens.max()) >= manifest.vocab_size:
                place = int(np.argmax(tokens >= manifest.vocab_size))
                offset = start + place * tokens.itemsize
                bad_token = f"token {tokens[place]} at offset {offset} is not below {manifest.vocab_size}"
            if checksums is not None and bad_block is None:
                expected = checksums[start // BLOCK :]
                bad_block = next(
                    (
                        start + at
                        for at, crc32 in zip(range(0, len(data), BLOCK), expected, strict=False)
                        if zlib.crc32(data[at : at + BLOCK]) != crc32
                    ),
                    None,
                )
            progress.finished(len(data))
    if found.hexdigest() == digest and bad_block is None:
        return f"{path}: {bad_token}" if bad_token else None
    where = "" if bad_block is None else f"; the first bad block is bytes {bad_block} to {bad_block + BLOCK}"
    return f"{path}: its SHA-256 is not the one in {MANIFEST}{where}"


def _chunks(file: BinaryIO) -> Iterator[tuple[int, memoryview]]:
    start = 0
    while data := file.read(_READ_BYTES):
        yield start, memoryview(data)
        start += len(data)
