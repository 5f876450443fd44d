from __future__ import annotations

import hashlib
import os
import re
import resource
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data.shards import foreign, reader
from dtrain.data.shards.format import BLOCK, MANIFEST, ShardManifest
from dtrain.data.shards.reader import TokenShards
from dtrain.errors import ConfigError, DataError
from tests.helpers.token_shards import rewrite_manifest, write_shards


def documents(lengths: list[int], vocab_size: int = 1000) -> list[np.ndarray]:
    generator = np.random.default_rng(len(lengths))
    return [generator.integers(vocab_size, size=length) for length in lengths]


def refuse(message: str, folder: Path, vocab_size: int | None = None, error: type[Exception] = DataError) -> None:
    with pytest.raises(error, match=message):
        TokenShards.open(folder, vocab_size)


LENGTHS = st.lists(st.lists(st.integers(1, 40), max_size=6), min_size=1, max_size=5)


@settings(max_examples=30)
@given(LENGTHS, st.integers(1, 60), st.sampled_from([1000, 100_000]), st.data())
def test_the_stream_is_the_concatenation_of_all_documents(
    tmp_path_factory: Any, lengths: list[list[int]], window: int, vocab_size: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    texts = [documents(own, vocab_size) for own in lengths]
    write_shards(folder, texts, vocab_size)
    shards = TokenShards.open(folder)
    flat = [document for own in texts for document in own]
    stream = np.concatenate([np.empty(0, np.int64), *flat])
    ends = np.cumsum([len(document) for document in flat], dtype=np.int64)
    assert (shards.num_tokens, shards.num_documents) == (len(stream), len(flat))
    assert shards.document_ends[:].tolist() == ends.tolist()
    if len(flat):
        assert shards.document_ends[-1] == ends[-1]
        positions = np.arange(len(stream))
        assert shards.document_ends.search(positions).tolist() == np.searchsorted(ends, positions, "right").tolist()
    window = min(window, len(stream))
    if window:
        starts = np.array(data.draw(st.lists(st.integers(0, len(stream) - window), max_size=8)), dtype=np.int64)
        expected = [stream[start : start + window].tolist() for start in starts]
        assert shards.read(starts, window).tolist() == expected
        sizes = np.array([1 + (7 * number) % window for number in range(len(starts))], dtype=np.int64)
        ranges = [stream[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        assert shards.read_ranges(starts, sizes).tolist() == np.concatenate([stream[:0], *ranges]).tolist()


def test_a_flipped_byte_is_found_when_its_block_is_read(tmp_path: Path) -> None:
    write_shards(tmp_path, [documents([100_000]), documents([100_000])], 1000)
    file = tmp_path / "00001.bin"
    content = bytearray(file.read_bytes())
    content[BLOCK + 17] ^= 1
    file.write_bytes(content)
    shards = TokenShards.open(tmp_path)
    per_block = BLOCK // 2
    shards.read(np.array([0, 100_000]), per_block)  # the blocks before it are good
    shards.read(np.array([100_000 + 2 * per_block]), 16)  # and the one behind it
    for start in (100_000 + per_block, 100_000 + 2 * per_block - 1, 100_000 + per_block - 1):
        damaged = rf"00001\.bin: bytes {BLOCK} to {2 * BLOCK} have the CRC-32"
        with pytest.raises(DataError, match=damaged):
            shards.read(np.array([start]), 2)
        with pytest.raises(DataError, match=damaged):
            shards.read_ranges(np.array([0, start]), np.array([5, 2]))


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("00000.ends", r"00000\.ends is damaged: its SHA-256"),
        ("00000.crc", r"00000\.crc is damaged: its SHA-256"),
        ("tokenizer.json", r"tokenizer\.json is not the tokenizer of these shards"),
        (MANIFEST, "manifest"),
    ],
)
def test_a_flipped_byte_of_a_small_file_is_found_at_the_start(tmp_path: Path, file: str, expected: str) -> None:
    write_shards(tmp_path, [documents([50, 60])], 1000)
    content = (tmp_path / file).read_bytes()
    for position in range(1, len(content), 1 + len(content) // 20):
        changed = bytearray(content)
        changed[position] ^= 4
        (tmp_path / file).write_bytes(changed)
        refuse(expected, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"version":1', '"version":9', "expected 'dtrain token shards', version 1"),
        ('"uint16"', '"float16"', "dtype 'float16'; expected uint16 or uint32"),
        ('"vocab_size":1000', '"vocab_size":3', r"token \d+ is beyond the vocabulary of 3"),
        ('"documents":2', '"documents":-1', r"shard 0: documents is -1; expected a whole number from 0"),
        ('"tokens":11', '"tokens":12', r"00000\.bin has 22 bytes; manifest\.json states 24"),
        ('"shards":[', '"shards":[],"rest":[', "0 shards; expected 1 to"),
        ('{"append', '["append', "not readable as JSON"),
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path: Path, old: str, new: str, expected: str) -> None:
    write_shards(tmp_path, [documents([5, 6])], 1000)
    text = (tmp_path / MANIFEST).read_text()
    assert old in text
    rewrite_manifest(tmp_path, text.replace(old, new, 1))
    refuse(expected, tmp_path)


def test_a_manifest_is_canonical_and_what_is_missing_is_named(tmp_path: Path) -> None:
    refuse("none is not a folder", tmp_path / "none", error=ConfigError)
    refuse(r"has neither manifest\.json nor \.bin files; write token shards with", tmp_path, error=ConfigError)
    write_shards(tmp_path, [documents([5, 6])], 1000)
    content = (tmp_path / MANIFEST).read_bytes()
    assert ShardManifest.from_bytes(content, "m").to_bytes() == content
    shards = TokenShards.open(tmp_path)
    assert shards.fingerprint == hashlib.sha256(content).hexdigest()
    refuse(r"states the vocabulary; remove data.vocab_size=5", tmp_path, 5, ConfigError)
    (tmp_path / MANIFEST).unlink()
    refuse("was interrupted; the same command finishes it", tmp_path, error=ConfigError)
    (tmp_path / "00000.bin").unlink()
    with pytest.raises(DataError, match=r"00000\.bin cannot be read any more: No such file"):
        shards.read(np.array([0]), 4)
    write_shards(tmp_path, [documents([5, 6])], 1000)
    (tmp_path / "00000.crc").unlink()
    refuse(r"00000\.crc cannot be read: No such file", tmp_path)


def test_20_gb_cost_little_memory(tmp_path: Path) -> None:
    """A sparse file: all tokens are 0, and all blocks have the checksum of zeros."""
    num_blocks = 20 * 10**9 // BLOCK
    num_tokens = num_blocks * BLOCK // 2
    zero = zlib.crc32(bytes(BLOCK))
    ends = np.array([num_tokens // 2, num_tokens], dtype="<u8")
    write_shards(tmp_path, [documents([4])], 1000)
    with (tmp_path / "00000.bin").open("wb") as file:
        file.truncate(num_blocks * BLOCK)
    (tmp_path / "00000.ends").write_bytes(ends.tobytes())
    (tmp_path / "00000.crc").write_bytes(np.full(num_blocks, zero, dtype="<u4").tobytes())
    manifest = (tmp_path / MANIFEST).read_text()
    manifest = manifest.replace('"documents":1', '"documents":2').replace('"tokens":4', f'"tokens":{num_tokens}')
    for kind in ("ends", "crc"):
        digest = hashlib.sha256((tmp_path / f"00000.{kind}").read_bytes()).hexdigest()
        manifest = re.sub(rf'("{kind}":")[0-9a-f]+', rf"\g<1>{digest}", manifest)
    rewrite_manifest(tmp_path, manifest)
    tracemalloc.start()
    shards = TokenShards.open(tmp_path)
    generator = np.random.default_rng(0)
    for _ in range(20):
        assert not shards.read(generator.integers(num_tokens - 2048, size=64), 2048).any()
    assert shards.document_ends.search(np.array([0, num_tokens - 1])).tolist() == [0, 1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 << 20


def llmc(path: Path, tokens: np.ndarray, magic: int = 20240520) -> None:
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype("<u2" if magic == 20240520 else "<u4").tobytes())


@pytest.mark.parametrize("magic", [20240520, 20240801])
def test_shards_of_llmc(tmp_path: Path, magic: int) -> None:
    tokens = np.arange(2000) % 700
    second = tmp_path / "web_000002.bin"
    llmc(tmp_path / "web_000001.bin", tokens[:900], magic)
    llmc(second, tokens[900:], magic)
    refuse("do not state the vocabulary; set data.vocab_size=N", tmp_path, error=ConfigError)
    shards, narrow = TokenShards.open(tmp_path, 700), TokenShards.open(tmp_path, 699)
    assert shards.read(np.array([0, 890, 1900]), 100).tolist() == [tokens[s : s + 100].tolist() for s in (0, 890, 1900)]
    assert shards.document_ends[:].tolist() == [900, 2000]
    assert shards.read_ranges(np.array([895, 3]), np.array([10, 2])).tolist() == [*tokens[895:905].tolist(), 3, 4]
    beyond = r"web_000002.bin: token 699 at position 499 is beyond the vocabulary of 699"
    with pytest.raises(DataError, match=beyond):
        narrow.read(np.array([1390]), 20)
    with pytest.raises(DataError, match=beyond):
        narrow.read_ranges(np.array([3, 1390]), np.array([4, 20]))
    llmc(second, tokens[900:][::-1], magic)
    assert TokenShards.open(tmp_path, 700).fingerprint != shards.fingerprint
    second.write_bytes(second.read_bytes()[:-2])
    refuse(r"web_000002.bin has \d+ bytes; its header states 1100 tokens", tmp_path, 700)
    second.write_bytes(tokens.astype("<u2").tobytes())
    refuse("expected 20240520 or 20240801, and version 1, of a shard of llm.c", tmp_path, 700)


def test_more_shards_than_open_files_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path, [documents([9]) for _ in range(60)], 1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 40, hard))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(reader, "allow_open_files", lambda count: None)  # as at the hard limit
            refuse("cannot be read: Too many open files; raise the hard limit", tmp_path)
        assert TokenShards.open(tmp_path).num_tokens == 540
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def megatron(path: Path, sequences: list[np.ndarray], borders: list[int], code: int = 8) -> None:
    size = {4: 4, 8: 2}.get(code, 2)
    lengths = np.array([len(own) for own in sequences], dtype="<i4")
    pointers = (np.cumsum(lengths) - lengths).astype("<i8") * size
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(sequences), len(borders))
    path.write_bytes(head + lengths.tobytes() + pointers.tobytes() + np.array(borders, dtype="<i8").tobytes())
    path.with_suffix(".bin").write_bytes(np.concatenate(sequences).astype("<u4" if size == 4 else "<u2").tobytes())


@pytest.mark.parametrize("code", [4, 8])
def test_shards_of_megatron(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = documents([10, 20, 5, 7])
    megatron(tmp_path / "a.idx", sequences, [0, 1, 3, 4], code)
    shards = TokenShards.open(tmp_path, 1000)
    assert shards.document_ends[:].tolist() == [10, 35, 42]  # the second document has two sequences
    assert shards.read(np.array([3]), 39)[0].tolist() == np.concatenate(sequences)[3:].tolist()
    monkeypatch.setattr(foreign, "BLOCK", 8)  # of large files only some blocks are read, of an index all
    monkeypatch.setattr(foreign, "_SAMPLED_BLOCKS", 2)
    found = set()
    for border in range(19, 22):
        megatron(tmp_path / "a.idx", documents([3] * 40), [0, 10, border, 30, 40], code)
        found.add(TokenShards.open(tmp_path, 1000).fingerprint)
    assert len(found) == 3


def test_wrong_indices_of_megatron(tmp_path: Path) -> None:
    index = tmp_path / "a.idx"
    megatron(index, documents([10, 20]), [0, 1, 2], code=5)
    refuse(r"the code of its dtype is 5; supported are 4 \(int32\) and 8 \(uint16\)", tmp_path, 1000)
    megatron(index, documents([10, 20]), [0, 1])
    refuse("its documents do not cover its 2 sequences", tmp_path, 1000)
    megatron(index, documents([10, 20]), [0, 1, 2])
    index.with_suffix(".bin").write_bytes(b"short")
    refuse(r"a.bin: 5 bytes; a.idx states 30 tokens of 2 bytes", tmp_path, 1000)
    index.write_bytes(index.read_bytes()[:-1])
    refuse(r"a.idx has \d+ bytes; its header states", tmp_path, 1000)
    index.write_bytes(b"nothing of Megatron's")
    refuse(r"expected .*MMIDIDX.*, version 1, of Megatron", tmp_path, 1000)
