"""Documents that share a row: attention, positions and loss are those of each document alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtrain.config.model import GPT2_FACTORY, ModelConfig
from dtrain.models import attention, attention_shape, build_model
from dtrain.models.attention import attention_kernel, causal_attention, document_borders
from dtrain.tasks import IGNORE_INDEX

VOCAB = 70
LENGTH = 24
SMALL = ModelConfig(num_layers=2, hidden_dim=32, num_heads=4, max_seq_len=LENGTH)
MODELS = {"transformer": SMALL, "grouped": replace(SMALL, num_kv_heads=2), "gpt2": replace(SMALL, factory=GPT2_FACTORY)}


def positions_of(rows: list[list[int]]) -> Tensor:
    """Returns the positions of rows of documents of these lengths."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def random_batch(rows: list[list[int]]) -> dict[str, Tensor]:
    """Returns a batch in which some targets do not count, and those across a border never do."""
    generator = torch.Generator().manual_seed(0)
    positions = positions_of(rows)
    tokens, targets = torch.randint(VOCAB, (2, *positions.shape), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = IGNORE_INDEX
    targets[:, :-1][positions[:, 1:] == 0] = IGNORE_INDEX
    return {"tokens": tokens, "targets": targets, "positions": positions}


def documents(batch: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields tokens [1, n] and targets [1, n] of each document."""
    borders = document_borders(batch["positions"]).tolist()
    for begin, end in pairwise(borders):
        yield batch["tokens"].flatten()[None, begin:end], batch["targets"].flatten()[None, begin:end]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_batch_has_the_loss_and_gradients_of_its_documents_one_by_one(name: str) -> None:
    model = build_model(MODELS[name], VOCAB, seed=0)
    batch = random_batch([[1, 10, 3, 10], [LENGTH], [23, 1], [2, 1, 1, 20]])
    packed = model(**batch)
    packed.loss.backward()
    got = gradients(model)
    counted = (batch["targets"] != IGNORE_INDEX).sum()
    total = torch.zeros(())
    logits = []
    for tokens, targets in documents(batch):
        alone = model(tokens, targets)
        total = total + alone.loss * (targets != IGNORE_INDEX).sum() / counted
        logits.append(alone.logits[0])
    total.backward()
    torch.testing.assert_close(packed.logits.flatten(0, 1), torch.cat(logits), rtol=0, atol=1e-6)
    torch.testing.assert_close(packed.loss, total, rtol=1e-6, atol=0)
    want = gradients(model)
    for parameter, gradient in got.items():
        torch.testing.assert_close(gradient, want[parameter], rtol=0, atol=1e-6)


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=6), min_size=1, max_size=4))
def test_borders_are_where_documents_and_rows_begin(rows: list[list[int]]) -> None:
    longest = max(sum(row) for row in rows)
    rows = [[*row, longest - sum(row)] if sum(row) < longest else row for row in rows]
    positions = positions_of(rows)
    borders = document_borders(positions)
    assert borders.dtype == torch.int32
    assert borders.tolist() == [0, *np.cumsum([length for row in rows for length in row]).tolist()]
    assert borders.diff().max() <= longest
    other_starts = torch.tensor([[5, 6, 0, 1], [3, 4, 5, 6]])  # a row begins a document all the same
    assert document_borders(other_starts).tolist() == [0, 2, 4, 8]


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_attention_within_documents_is_that_of_a_block_mask(monkeypatch: pytest.MonkeyPatch, kv_heads: int) -> None:
    """Also by a written-out kernel, which stands in for the GPU's."""

    def varlen_attn(query: Tensor, key: Tensor, value: Tensor, *borders: Any, **how: Any) -> Tensor:
        cu_seq_q, cu_seq_k, max_q, max_k = borders
        assert query.dim() == key.dim() == value.dim() == 3
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert (how["window_size"], how.get("enable_gqa", False)) == ((-1, 0), kv_heads != 4)
        out = torch.full_like(query, float("nan"))
        for first, last in pairwise(cu_seq_q.tolist()):
            assert last - first <= max_q == max_k
            q, k, v = (x[first:last].transpose(0, 1).double() for x in (query, key, value))
            k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
            scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(torch.ones(q.shape[1], q.shape[1]).triu(1) > 0, -1e9)
            out[first:last] = (scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype)
        return out

    positions = positions_of([[3, 1, 6], [10]])
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(2, 10, heads, 8, generator=generator) for heads in (4, kv_heads, kv_heads))
    numbers = (positions == 0).cumsum(1)
    mask = (numbers[:, None, :, None] == numbers[:, None, None, :]) & torch.ones(10, 10, dtype=torch.bool).tril()
    transposed = [x.transpose(1, 2) for x in (queries, keys, values)]
    want = F.scaled_dot_product_attention(*transposed, attn_mask=mask, enable_gqa=True).transpose(1, 2).flatten(-2)
    assert not attention.has_varlen_kernel(queries.bfloat16(), keys.bfloat16(), 0.0), "for GPUs"
    torch.testing.assert_close(causal_attention(queries, keys, values, 0.0, document_borders(positions)), want)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda queries, keys, dropout: True)
    torch.testing.assert_close(causal_attention(queries, keys, values, 0.0, document_borders(positions)), want)


@pytest.mark.parametrize(
    ("kv_heads", "options", "expected"),
    [(2, {"window_size", "enable_gqa"}, True), (2, {"window_size"}, False), (4, {"window_size"}, True), (4, [], False)],
)
def test_a_kernel_without_grouped_queries_is_used_for_as_many_key_heads(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, options: Iterable[str], expected: bool
) -> None:
    """torch 2.11 has no ``enable_gqa``."""
    monkeypatch.setattr(attention, "_varlen_options", lambda: frozenset(options))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    attention._gpu_has_varlen.cache_clear()
    states = mock.Mock(is_cuda=True, dtype=torch.bfloat16, shape=(1, 8, 4, 64), device=torch.device("cuda", 0))
    keys = mock.Mock(shape=(1, 8, kv_heads, 64))
    assert attention.has_varlen_kernel(states, keys, 0.0) is expected
    attention._gpu_has_varlen.cache_clear()


@pytest.mark.exhaustive
def test_compiled_blocks_take_any_documents() -> None:
    model = build_model(SMALL, VOCAB, seed=0)
    batches = [random_batch(rows) for rows in ([[LENGTH]], [[10, 14]], [[8, 8, 8]], [[2, 2, 20]])]
    want = [model(**batch).loss for batch in batches]
    torch.compiler.reset()
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="eager")
    with torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True):
        got = [model(**batch).loss for batch in batches]
    torch.testing.assert_close(got, want)


CPU = torch.device("cpu")
SIZES = {"batch": 2, "heads": 8, "kv_heads": 4, "seq_len": 16, "head_dim": 32}


@pytest.mark.parametrize(
    ("backend", "kernel"), [(SDPBackend.FLASH_ATTENTION, "FlashAttention 2"), (SDPBackend.MATH, "math")]
)
def test_the_named_kernel_is_the_one_that_torch_chooses(backend: SDPBackend, kernel: str) -> None:
    with sdpa_kernel(backend):
        assert attention_kernel(CPU, torch.float32, **SIZES) == kernel


def test_the_choice_is_asked_for_training_with_the_shapes_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Tensor, ...]] = []

    def choose(*operands: Tensor, dropout_p: float, is_causal: bool, enable_gqa: bool) -> int:
        assert (dropout_p, is_causal, enable_gqa, torch.is_grad_enabled()) == (0.0, True, True, True)
        asked.append(operands)
        return next(choices)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    known = dict(enumerate(("math", "FlashAttention 3", "memory-efficient", "cuDNN")))
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: "FA3")
    unknown = {number: f"unknown: PyTorch chose {number}, which names no kernel" for number in (-1, 99)}
    choices = iter(known | unknown)
    for kernel in (known | unknown).values():
        with torch.no_grad():
            assert attention_kernel(CPU, torch.float16, **SIZES) == kernel
    assert [operand.shape for operand in asked[0]] == [(2, 8, 16, 32), (2, 4, 16, 32), (2, 4, 16, 32)]
    assert {(x.dtype, x.requires_grad, x.stride(1)) for x in asked[0]} == {(torch.float16, True, 32)}
    monkeypatch.setattr(torch, "_fused_sdp_choice", mock.Mock(side_effect=RuntimeError("no such device\nmore")))
    assert attention_kernel(CPU, torch.float32, **SIZES) == "unknown: no such device"
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    assert attention_kernel(CPU, torch.float32, **SIZES).startswith("unknown: module 'torch' has no attribute")


def test_the_shape_of_attention_follows_the_configuration() -> None:
    assert attention_shape(SMALL) == (4, 4, 8, 0.0)
    assert attention_shape(replace(SMALL, num_kv_heads=2, dropout=0.1)) == (4, 2, 8, 0.1)
    assert attention_shape(replace(SMALL, factory=GPT2_FACTORY)) == (4, 4, 8, 0.0)
    assert attention_shape(replace(SMALL, factory="mine:build")) is None
