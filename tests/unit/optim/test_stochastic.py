"""Stochastic rounding: unbiased, bounded, the same bits anywhere; and what AdamW with BF16 moments gains by it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dtrain.config.optim import AdamW, AdamWBF16
from dtrain.optim import formula
from dtrain.optim.stochastic import random_bits, round_to_bf16, step_words, stream_start
from tests.helpers.arena import DECAYED, SLOWER, Arena, scalars

CPU = torch.device("cpu")
EIGHT_BITS = 2.0**-7
"""Distance of neighbors in BF16, relative to the lower power of two."""


def bits_of(numel: int, *, key: int = 3, index: int = 0, step: int = 1) -> Tensor:
    return random_bits((stream_start(key, index, CPU), *step_words(step, CPU)), torch.empty(numel))


def lowbias32(index: int, key: int, step: int) -> int:
    """The same in Python's integers, written from the publication."""

    def rounds(x: int, words: tuple[int, int] = (0, 0)) -> int:
        x = (x ^ words[0]) & 0xFFFFFFFF
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        x ^= words[1]
        x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        return x ^ (x >> 16)

    first = rounds(step)
    return rounds((rounds(key) + index) & 0xFFFFFFFF, (first, rounds(first ^ 0x9E3779B9)))


@pytest.mark.parametrize("index", [0, 2**31 - 5, 2**32 - 5, 2**40])
@pytest.mark.parametrize(("key", "step"), [(0, 1), (0xDEADBEEF, 2**24), (7, 123456)])
def test_the_bits_are_the_published_hash(index: int, key: int, step: int) -> None:
    got = bits_of(9, key=key, index=index, step=step).tolist()
    assert [value & 0xFFFFFFFF for value in got] == [lowbias32(index + i, key, step) for i in range(9)]


@pytest.mark.compile
def test_compiled_bits_are_the_eager_ones() -> None:
    compiled = torch.compile(random_bits, dynamic=True, fullgraph=True)
    noise = stream_start(3, 2**32 - 50, CPU), *step_words(5, CPU)
    for numel in (64, 1000, 4097):
        assert torch.equal(compiled(noise, torch.empty(numel)), bits_of(numel, index=2**32 - 50, step=5))


def test_both_halves_are_uniform_and_independent_of_step_key_and_each_other() -> None:
    """Within 4 sigma; the halves are the two moments' bits."""
    numel = 1 << 17

    def halves(**where: int) -> list[Tensor]:
        bits = bits_of(numel, **where)
        return [(bits & 0xFFFF).double() / 65536 - 0.5, ((bits >> 16) & 0xFFFF).double() / 65536 - 0.5]

    streams = [*halves(), *halves(step=2), *halves(key=4), *halves(index=1)]
    for stream in streams:
        assert abs(stream.mean()) < 4 * math.sqrt(1 / 12 / numel)
        counts = torch.histc(stream, 256, -0.5, 0.5)
        assert abs(((counts - numel / 256) ** 2 / (numel / 256)).sum() - 255) < 4 * math.sqrt(2 * 255)
    for i, one in enumerate(streams):
        for other in streams[:i]:
            assert abs((one * other).mean() * 12) < 4 / math.sqrt(numel)


@pytest.mark.parametrize("value", [1.0 + 0.3 * EIGHT_BITS, -1.0 - 0.3 * EIGHT_BITS, 3.14159, 1e-30, -2.5e-40])
def test_the_mean_is_the_value(value: float) -> None:
    """Within 4 sigma over elements and steps; a subnormal number too."""
    numel, steps = 1 << 14, 16
    values = torch.full((numel,), value)
    rounded = [round_to_bf16(values, bits_of(numel, step=step) & 0xFFFF).double() for step in range(1, steps + 1)]
    found = torch.cat(rounded)
    low, high = found.unique().tolist()
    exact = values[0].double()
    assert low < exact < high
    up = (exact - low) / (high - low)
    sigma = (high - low) * math.sqrt(up * (1 - up) / found.numel())
    assert abs(found.mean() - exact) < 4 * sigma


@given(st.lists(st.floats(width=32), min_size=1, max_size=64), st.integers(0, 0xFFFF))
def test_a_value_becomes_one_of_its_neighbors(numbers: list[float], bits: int) -> None:
    values = torch.tensor(numbers)
    got = round_to_bf16(values, torch.full_like(values, bits, dtype=torch.int32))
    below = (values.view(torch.int32) & -0x10000).view(torch.float32).bfloat16()  # towards zero
    above = (below.view(torch.int16) + 1).view(torch.bfloat16)
    exact = (below.float() == values) | values.isinf()
    is_neighbor = torch.where(exact, got.float() == values, (got == below) | (got == above))
    assert torch.where(values.isnan(), got.isnan(), is_neighbor).all()


@pytest.mark.parametrize("bits", [0, 0x8000, 0xFFFF])
def test_the_ends_of_the_range_stay(bits: int) -> None:
    largest = torch.finfo(torch.bfloat16).max
    values = torch.tensor([largest, -largest, math.inf, -math.inf, 0.0, -0.0])
    got = round_to_bf16(values, torch.full_like(values, bits, dtype=torch.int32))
    assert torch.equal(got.float().view(torch.int32), values.view(torch.int32))
    nans = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert round_to_bf16(nans, torch.full_like(nans, bits, dtype=torch.int32)).isnan().all()


def test_the_master_moves_by_the_moments_before_they_are_rounded() -> None:
    """From equal moments, one update is that of FP32 moments, and each moment is rounded to a neighbor."""
    record = AdamWBF16(compile=False)
    arena = Arena(record, [DECAYED, SLOWER])
    arena.steps(number=5)
    exact = Arena(replace(AdamW(), compile=False), [DECAYED, SLOWER])
    exact.master.copy_(arena.master)
    for name, state in exact.states.items():
        state.copy_(arena.states[name])
    exact.main_grad.copy_(arena.new_gradient())
    for each in (arena, exact):
        each.optimizer().update([0], scalars(6, 0.01))
    torch.testing.assert_close(arena.master, exact.master, rtol=1e-6, atol=1e-7)
    for name, state in exact.states.items():
        assert ((arena.states[name].double() - state).abs() <= EIGHT_BITS * state.abs()).all(), name
        assert not torch.equal(arena.states[name], state.bfloat16()), "rounded to the nearest"


def loss_after_training(record: AdamW) -> float:
    """Returns the mean loss at the end of a least-squares regression on noisy mini-batches."""
    generator = torch.Generator().manual_seed(0)
    arena = Arena(record, [DECAYED])
    inputs = torch.randn(16, 256, 1024, generator=generator) * torch.logspace(0, -2, 1024)
    target = torch.randn(1024, generator=generator)
    optimizer = arena.optimizer()
    arena.master.zero_()
    losses = []
    for step in range(1, 401):
        x = inputs[step % 16]
        error = x @ (arena.master - target) + 0.1 * torch.randn(256, generator=generator)
        losses.append(error.square().mean().item())
        arena.main_grad.copy_(2 * x.T @ error / 256)
        optimizer.update([0], scalars(step, 0.1 * (1 - step / 401)))
    return sum(losses[-100:]) / 100


def test_a_model_trains_as_with_fp32_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    want = loss_after_training(AdamW(betas=(0.9, 0.999), compile=False))
    record = AdamWBF16(betas=(0.9, 0.999), compile=False)
    assert abs(loss_after_training(record) / want - 1) < 0.01
    monkeypatch.setattr(formula, "round_to_bf16", lambda values, bits: values.bfloat16())
    assert abs(loss_after_training(record) / want - 1) > 0.05, "rounded to the nearest"
