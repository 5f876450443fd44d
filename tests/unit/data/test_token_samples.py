"""Samples of token shards, held against a loop over documents."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dtrain.config.model import GPT2_FACTORY, ModelConfig
from dtrain.data.packing import pack_documents
from dtrain.data.token_samples import PackedDocuments, ShardWindows
from dtrain.models import build_model
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


def pairs(batch: dict[str, Tensor]) -> list[tuple[int, int]]:
    """Returns input and target wherever the target counts."""
    counted = batch["targets"] != IGNORE_INDEX
    return sorted(zip(batch["tokens"][counted].tolist(), batch["targets"][counted].tolist(), strict=True))


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
def test_packed_samples_have_every_pair_of_every_document_once(lengths: list[int], seq_len: int) -> None:
    source = packed(lengths, seq_len)
    if not source.num_samples:
        return
    batch = source.batch(np.arange(source.num_samples))
    want = [pair for tokens in documents(lengths) for pair in pairwise(tokens)]
    assert pairs(batch) == want
    assert set(batch["tokens"].flatten().tolist()) <= {0, *(token for token, _ in want)}


@given(LENGTHS, st.integers(1, 17), st.data())
def test_a_packed_sample_is_pieces_with_positions_of_their_own_then_padding(
    lengths: list[int], seq_len: int, data: st.DataObject
) -> None:
    source = packed(lengths, seq_len)
    if not source.num_samples:
        return
    ids = np.array(data.draw(st.lists(st.integers(0, source.num_samples - 1), min_size=1, max_size=5)))
    batch = source.batch(ids)
    packing = source.packing
    for row, number in enumerate(ids.tolist()):
        tokens: list[int] = []
        positions: list[int] = []
        for fragment in range(packing.bounds[number], packing.bounds[number + 1]):
            start, length = int(packing.starts[fragment]), int(packing.lengths[fragment])
            tokens += range(start + 1, start + 1 + length)
            positions += range(length)
        rest = seq_len - len(tokens)
        assert batch["tokens"][row].tolist() == tokens + [0] * rest
        assert batch["targets"][row].tolist() == [token + 1 for token in tokens] + [IGNORE_INDEX] * rest
        assert batch["positions"][row].tolist() == positions + list(range(rest))


@pytest.mark.parametrize("factory", [ModelConfig.factory, GPT2_FACTORY])
@pytest.mark.parametrize("pack", ["windows", "best_fit"])
def test_loss_and_gradients_of_samples_are_those_of_their_documents_one_by_one(factory: str, pack: str) -> None:
    lengths, seq_len = [30, 3, 1, 9, 2, 60, 17, 24, 5, 5, 5, 40], 24
    config = ModelConfig(num_layers=2, hidden_dim=32, num_heads=4, max_seq_len=seq_len, factory=factory)
    model = build_model(config, 256, seed=0)
    source = packed(lengths, seq_len) if pack == "best_fit" else windows(lengths, seq_len, masks=True)
    batch = source.batch(np.arange(source.num_samples))
    together = model(**batch).loss
    together.backward()
    got = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)

    # documents are cut where samples are full, and by windows also where one ends
    cuts = [list(range(0, max(1, n - 1), seq_len)) for n in lengths]
    if pack == "windows":
        begins = np.cumsum([0, *lengths]).tolist()
        cuts = [[0, *(c for c in range(1, n) if (b + c) % seq_len == 0)] for b, n in zip(begins, lengths, strict=False)]
    total, num_targets = torch.zeros(()), int((batch["targets"] != IGNORE_INDEX).sum())
    seen = 0
    for tokens, begins_of_pieces in zip(documents(lengths), cuts, strict=True):
        for begin, end in zip(begins_of_pieces, [*begins_of_pieces[1:], len(tokens) - 1], strict=True):
            targets = torch.tensor([tokens[begin + 1 : end + 1]])
            if pack == "windows" and tokens[begin] > source.num_samples * seq_len:
                continue  # in no whole window
            if targets.numel():
                total = total + model(torch.tensor([tokens[begin:end]]), targets).loss * targets.numel() / num_targets
                seen += targets.numel()
    assert seen == num_targets
    torch.testing.assert_close(together, total, rtol=1e-6, atol=0)
    total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=0, atol=1e-6)
