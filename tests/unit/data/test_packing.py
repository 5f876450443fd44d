from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtrain.data.packing import Packing, assign_samples, pack_documents, plan_folder, read_plan, write_plan
from dtrain.data.token_samples import PackedDocuments, ShardWindows
from dtrain.errors import ConfigError
from dtrain.tasks import IGNORE_INDEX
from tests.helpers.token_shards import MemoryShards

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=60)
SHARDS = "a" * 64


def pack(lengths: list[int], seq_len: int) -> Packing:
    return pack_documents(np.cumsum(np.array(lengths, np.int64)), seq_len)


@given(st.lists(st.integers(1, 16), max_size=80), st.just(16) | st.integers(16, 30))
def test_samples_are_as_full_as_those_of_best_fit_one_by_one(lengths: list[int], seq_len: int) -> None:
    rooms: list[int] = []  # the oracle: each fragment alone, longest first
    for length in sorted(lengths, reverse=True):
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting)[1]] -= length
        else:
            rooms.append(seq_len - length)
    samples, num_samples = assign_samples(np.array(lengths, np.int64), seq_len)
    filled = np.bincount(samples, weights=lengths, minlength=num_samples)
    assert sorted(seq_len - filled) == sorted(rooms)


def test_a_plan_beside_the_shards_is_read_by_memory_map(tmp_path: Path) -> None:
    packing = pack([5, 9, 3, 2], 6)
    plan = write_plan(tmp_path, packing, 6, SHARDS)
    assert (plan["samples"], plan["targets"]) == (packing.num_samples, 4 + 8 + 2 + 1)
    names = ("starts", "lengths", "bounds")
    files = {path.name for path in plan_folder(tmp_path, 6).iterdir()}
    assert files == {"plan.json", *(f"{name}.npy" for name in names)}
    read, digest = read_plan(tmp_path, 6, SHARDS)
    for name in names:
        assert isinstance(getattr(read, name), np.memmap)
        assert getattr(read, name).tolist() == getattr(packing, name).tolist()
    write_plan(tmp_path, packing, 6, SHARDS)
    assert read_plan(tmp_path, 6, SHARDS)[1] == digest


def refusal(folder: Path, shards: str = SHARDS) -> str:
    with pytest.raises(ConfigError) as caught:
        read_plan(folder, 6, shards)
    message = str(caught.value)
    assert message.endswith(f"; run dtrain data pack {folder} seq_len=6")
    assert "\n" not in message
    return message


def test_a_plan_that_is_absent_damaged_or_of_other_shards_is_refused(tmp_path: Path) -> None:
    assert "does not exist: no file plan.json" in refusal(tmp_path)
    write_plan(tmp_path, pack([5, 9], 6), 6, SHARDS)
    assert "is of other shards" in refusal(tmp_path, "b" * 64)
    folder = plan_folder(tmp_path, 6)
    file, plan = folder / "lengths.npy", folder / "plan.json"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "is damaged: lengths.npy has the sha256" in refusal(tmp_path)
    file.unlink()
    assert "does not exist: no file lengths.npy" in refusal(tmp_path)
    file.write_bytes(content)
    read_plan(tmp_path, 6, SHARDS)
    values = json.loads(plan.read_text())
    plan.write_text(json.dumps(values | {"version": 9}))
    assert "has version 9, expected 1" in refusal(tmp_path)
    for text in ("{", "[]", '{"version": 1}', json.dumps({**values, "sha256": 3})):
        plan.write_text(text)
        assert "is damaged: plan.json" in refusal(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/packing").write_text("in the way")
    with pytest.raises(ConfigError, match=r"packing/6: the plan cannot be written: Not a directory"):
        write_plan(tmp_path / "other", pack([5, 9], 6), 6, SHARDS)


STREAMS = LENGTHS.filter(lambda lengths: sum(lengths) > 1)


def windows(lengths: list[int], seq_len: int, *, masks: bool) -> ShardWindows:
    return ShardWindows(MemoryShards(lengths), seq_len, masks)


def packed(lengths: list[int], seq_len: int) -> PackedDocuments:
    shards = MemoryShards(lengths)
    return PackedDocuments(shards, pack_documents(shards.document_ends[:], seq_len), seq_len)


def documents(lengths: list[int]) -> list[list[int]]:
    """Returns the tokens of each document of ``MemoryShards(lengths)``."""
    ends = np.cumsum(lengths).tolist()
    return [list(range(end - length + 1, end + 1)) for end, length in zip(ends, lengths, strict=True)]


@given(STREAMS, st.integers(1, 17))
def test_windows_of_one_stream_use_each_token_but_the_first_as_a_target_once(lengths: list[int], seq_len: int) -> None:
    source = windows(lengths, seq_len, masks=False)
    total = (sum(lengths) - 1) // seq_len * seq_len
    assert source.num_samples * seq_len == total
    if total:
        batch = source.batch(np.arange(source.num_samples))
        assert batch.keys() == {"tokens", "targets"}
        assert batch["tokens"].flatten().tolist() == list(range(1, total + 1))
        assert batch["targets"].flatten().tolist() == list(range(2, total + 2))


@given(STREAMS, st.integers(1, 17), st.data())
def test_masked_windows_restart_at_borders(lengths: list[int], seq_len: int, data: st.DataObject) -> None:
    source = windows(lengths, seq_len, masks=True)
    if not source.num_samples:
        return
    begins = {tokens[0] for tokens in documents(lengths) if tokens}
    ids = np.array(data.draw(st.lists(st.integers(0, source.num_samples - 1), min_size=1, max_size=5)))
    batch = source.batch(ids)
    for number, tokens, targets, positions in zip(ids.tolist(), *(t.tolist() for t in batch.values()), strict=True):
        assert tokens == list(range(number * seq_len + 1, (number + 1) * seq_len + 1))
        assert targets == [IGNORE_INDEX if token + 1 in begins else token + 1 for token in tokens]
        expected = 0
        for token, position in zip(tokens, positions, strict=True):
            expected = 0 if token in begins else expected
            assert position == expected
            expected += 1


@given(STREAMS, st.integers(1, 17))
def test_packed_samples_have_each_pair_of_a_document_once_then_padding(lengths: list[int], seq_len: int) -> None:
    source = packed(lengths, seq_len)
    if not source.num_samples:
        return
    batch = source.batch(np.arange(source.num_samples))
    counted = batch["targets"] != IGNORE_INDEX
    pairs = zip(batch["tokens"][counted].tolist(), batch["targets"][counted].tolist(), strict=True)
    assert sorted(pairs) == [pair for tokens in documents(lengths) for pair in pairwise(tokens)]
    packing = source.packing
    assert packing.num_targets == int(counted.sum())
    # only documents longer than a sample are cut
    assert len(packing.lengths) == sum(-(-max(0, length - 1) // seq_len) for length in lengths)
    for row in range(source.num_samples):
        tokens: list[int] = []
        positions: list[int] = []
        for fragment in range(packing.bounds[row], packing.bounds[row + 1]):
            start, length = int(packing.starts[fragment]), int(packing.lengths[fragment])
            tokens += range(start + 1, start + 1 + length)
            positions += range(length)
        rest = seq_len - len(tokens)
        assert batch["tokens"][row].tolist() == tokens + [0] * rest
        assert batch["targets"][row].tolist() == [token + 1 for token in tokens] + [IGNORE_INDEX] * rest
        assert batch["positions"][row].tolist() == positions + list(range(rest))
    some = np.array([source.num_samples - 1, 0])
    assert all(torch.equal(values[some], source.batch(some)[name]) for name, values in batch.items())
