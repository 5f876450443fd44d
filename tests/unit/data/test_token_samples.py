"""Samples of token shards, held against a loop over documents."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtrain.data.packing import pack_documents
from dtrain.data.token_samples import PackedDocuments, ShardWindows
from dtrain.tasks import IGNORE_INDEX
from tests.helpers.token_shards import MemoryShards

LENGTHS = st.lists(st.integers(0, 40), min_size=2, max_size=40).filter(lambda lengths: sum(lengths) > 1)


def windows(lengths: list[int], seq_len: int, *, masks: bool) -> ShardWindows:
    return ShardWindows(MemoryShards(lengths), seq_len, masks)


def packed(lengths: list[int], seq_len: int) -> PackedDocuments:
    shards = MemoryShards(lengths)
    return PackedDocuments(shards, pack_documents(shards.document_ends[:], seq_len), seq_len)


def documents(lengths: list[int]) -> list[list[int]]:
    """Returns the tokens of each document of ``MemoryShards(lengths)``."""
    ends = np.cumsum(lengths).tolist()
    return [list(range(end - length + 1, end + 1)) for end, length in zip(ends, lengths, strict=True)]


@given(LENGTHS, st.integers(1, 17))
def test_windows_of_one_stream_use_each_token_but_the_first_as_a_target_once(lengths: list[int], seq_len: int) -> None:
    source = windows(lengths, seq_len, masks=False)
    total = (sum(lengths) - 1) // seq_len * seq_len
    assert source.num_samples * seq_len == total
    if total:
        batch = source.batch(np.arange(source.num_samples))
        assert batch.keys() == {"tokens", "targets"}
        assert batch["tokens"].flatten().tolist() == list(range(1, total + 1))
        assert batch["targets"].flatten().tolist() == list(range(2, total + 2))


@given(LENGTHS, st.integers(1, 17), st.data())
def test_masked_windows_restart_positions_and_count_no_target_across_a_border(
    lengths: list[int], seq_len: int, data: st.DataObject
) -> None:
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


@given(LENGTHS, st.integers(1, 17))
def test_packed_samples_have_each_pair_of_a_document_once_then_padding(lengths: list[int], seq_len: int) -> None:
    source = packed(lengths, seq_len)
    if not source.num_samples:
        return
    batch = source.batch(np.arange(source.num_samples))
    counted = batch["targets"] != IGNORE_INDEX
    pairs = zip(batch["tokens"][counted].tolist(), batch["targets"][counted].tolist(), strict=True)
    assert sorted(pairs) == [pair for tokens in documents(lengths) for pair in pairwise(tokens)]
    packing = source.packing
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
