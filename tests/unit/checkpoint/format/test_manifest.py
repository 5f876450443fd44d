"""Shards, state, manifest and safetensors headers, without a checkpoint directory."""

import json
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.checkpoint.format.checked_file import DamageError
from dtrain.checkpoint.format.manifest import FileEntry, FileInterval, Manifest, TensorEntry, check_tiling
from dtrain.checkpoint.format.safetensors_file import StoredTensor, encode_header, read_header
from dtrain.checkpoint.snapshot import TensorShard, stored_state
from dtrain.errors import CheckpointError


def make_shard(**changes: Any) -> TensorShard:
    fields = {"name": "w", "kind": "master", "shape": (2, 3), "dtype": torch.float32, "start": 1, "stop": 4}
    return TensorShard(**({**fields, "values": torch.zeros(3)} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "Master:x"}, "a kind is a lower-case word"),
        ({"stop": 7}, r"\[1, 7\) is not an interval of its 6 elements"),
        ({"start": -1}, r"\[-1, 4\)"),
        ({"values": torch.zeros(2)}, r"expected data of shape \[3\]"),
        ({"values": torch.zeros(3, 1)}, r"got \[3, 1\]"),
        ({"values": torch.zeros(3).half()}, "got .3. and torch.float16"),
        ({"values": torch.zeros(6)[::2]}, "not contiguous"),
        ({"dtype": torch.complex128}, "torch.complex128 cannot be saved; use one of .*float32"),
    ],
)
def test_inconsistent_shards_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"shard .*:w: .*{message}"):
        make_shard(**changes)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": [1, float("nan")]}}, r"state\['a'\]\['b'\]\[1\]"),
        ({"a": {"b": [1, torch.zeros(1)]}}, r"state\['a'\]\['b'\]\[1\]"),
        ({"a": {3: 1}}, r"state\['a'\] has the key 3"),
    ],
)
def test_state_that_json_cannot_store_is_refused(state: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        stored_state(state)


def test_only_secrets_of_the_config_are_redacted() -> None:
    config = {
        "tracker": {"wandb_api_key": "CANARY", "entity": "me"},
        "password": 1234,
        "url": "postgres://me:CANARY@host/db",
        "data": {"num_tokens": 7, "tokenizer": "bytes"},
    }
    state = {"config": config, "extra": {"token": "mine"}, "aliases": {"secret.weight": "w"}}
    stored = stored_state(state)
    assert "CANARY" not in json.dumps(stored)
    assert stored["config"]["password"] == "***"
    assert stored["config"]["data"] == config["data"]
    assert {key: stored[key] for key in ("extra", "aliases")} == {key: state[key] for key in ("extra", "aliases")}
    assert config["password"] == 1234, "the caller's own is untouched"


@pytest.mark.parametrize(
    ("intervals", "message"),
    [
        ([(0, 4, "rank 0"), (6, 10, "rank 1")], "no rank or file holds elements 4 to 6 .between rank 0 and rank 1"),
        ([(0, 6, "rank 0"), (4, 10, "rank 1")], "both rank 0 and rank 1 hold elements 4 to 6"),
        ([(1, 10, "rank 0")], "no rank or file holds elements 0 to 1 .between the start and rank 0"),
        ([(0, 9, "rank 0")], "no rank or file holds elements 9 to 10 .after rank 0"),
        ([], "no rank or file holds elements 0 to 10"),
    ],
)
def test_gaps_and_overlaps_name_the_adjacent_owners(intervals: list[tuple[int, int, str]], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"master:w: .*{message}"):
        check_tiling("master:w", 10, intervals)


@pytest.mark.parametrize(("hash", "version"), [("sha256", 1), ("blake3", 2)])
def test_manifest_encoding_is_canonical_and_round_trips(hash: str, version: int) -> None:
    chunks = (FileInterval("r0000.safetensors", "master:ä", 0, 4), FileInterval("r0001.safetensors", "master:ä", 4, 6))
    tensors = (
        TensorEntry("ä", "master", torch.float32, (2, 3), 0xFFFF_FFFF_FFFF_FFFF, chunks),
        TensorEntry("none", "buffer", torch.bool, (0, 3), 0, ()),
    )
    files = tuple(FileEntry(f"r000{i}.safetensors", 100 + i, hash, "ab" * 32) for i in range(2))
    state = {"b": [1, 0.1, None, True], "a": {"z": "é", "y": 10**30}}
    manifest = Manifest(7, "2030-01-01T00:00:00+00:00", state, files, tensors)
    data = manifest.encode()
    assert Manifest.decode(data) == manifest
    assert Manifest.decode(data).encode() == data
    assert b" " not in data.replace(b"T00:00:00", b"")
    assert data.isascii()
    raw = json.loads(data.partition(b"\n")[2])
    assert raw["version"] == version
    assert raw["files"][0] == {"name": "r0000.safetensors", "bytes": 100, hash: "ab" * 32}


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool])


def header_of(content: bytes) -> dict[str, StoredTensor]:
    descriptor = os.memfd_create("file")
    try:
        os.write(descriptor, content)
        return read_header(descriptor, "f", len(content))
    finally:
        os.close(descriptor)


@settings(max_examples=25)
@given(st.lists(st.tuples(DTYPES, SHAPES), max_size=6))
def test_header_round_trips(tensors: list[tuple[torch.dtype, tuple[int, ...]]]) -> None:
    header = encode_header([(f"k{i}", dtype, shape) for i, (dtype, shape) in enumerate(tensors)])
    sizes = [torch.empty(shape, dtype=dtype).nbytes for dtype, shape in tensors]
    spans = header_of(header + bytes(sum(sizes)))
    assert len(header) % 8 == 0
    assert [(span.dtype, span.shape) for span in spans.values()] == tensors
    assert [span.end - span.begin for span in spans.values()] == sizes


@settings(max_examples=100)
@given(st.binary(max_size=64), st.integers(0, 2**64 - 1) | st.integers(0, 64))
def test_arbitrary_header_bytes_are_refused_or_tile_the_file(data: bytes, length: int) -> None:
    content = length.to_bytes(8, "little") + data
    try:
        spans = header_of(content)
    except DamageError:
        return
    assert sum(span.end - span.begin for span in spans.values()) == len(content) - 8 - length
