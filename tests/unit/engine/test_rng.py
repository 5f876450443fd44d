"""Random numbers are keyed by what is computed, and the caller's generators are restored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dtrain
from dtrain.engine.rng import keyed_rng, rng_key

CPU = torch.device("cpu")
seeds = st.integers(0, 2**63 - 1)
counts = st.integers(0, 2**40)
KNOWN = (1195769770526638388, 8979783157863330958)


def test_keys_of_a_run_all_differ() -> None:
    keys = {rng_key(seed, step, index) for seed in range(8) for step in range(64) for index in range(64)}
    assert len(keys) == 8 * 64 * 64


def test_key_depends_on_the_order_of_its_arguments() -> None:
    assert len({rng_key(1, 2, 3), rng_key(1, 3, 2), rng_key(2, 1, 3), rng_key(3, 2, 1), rng_key(6, 0, 0)}) == 5


@given(seeds, counts, counts)
def test_a_key_is_a_function_of_its_three_numbers_in_63_bits(seed: int, step: int, index: int) -> None:
    key = rng_key(seed, step, index)
    assert key == rng_key(seed, step, index)
    assert 0 <= key < 2**63
    torch.Generator().manual_seed(key)


@given(seeds, counts, counts, st.integers(0, 39))
def test_one_bit_of_the_index_changes_about_half_of_the_key(seed: int, step: int, index: int, bit: int) -> None:
    changed = rng_key(seed, step, index) ^ rng_key(seed, step, index ^ 1 << bit)
    assert 8 <= changed.bit_count() <= 55  # 63 fair coins fall outside with probability 1e-9


def test_keys_equal_those_of_earlier_versions() -> None:
    """Resuming an old run draws the numbers it would have drawn."""
    assert rng_key(0, 0, 0) == KNOWN[0]
    assert rng_key(11, 5, 3) == KNOWN[1]


def test_generator_state_is_restored() -> None:
    torch.manual_seed(5)
    want = torch.rand(4)
    torch.manual_seed(5)
    with keyed_rng(CPU, 1):
        torch.rand(1000)
        torch.manual_seed(3)
    assert torch.equal(torch.rand(4), want)


def test_generator_state_is_restored_after_an_error() -> None:
    state = torch.get_rng_state()
    with pytest.raises(IndexError), keyed_rng(CPU, 1):
        torch.rand(3)[5]
    assert torch.equal(torch.get_rng_state(), state)


def test_one_key_gives_one_sequence_whatever_came_before() -> None:
    draws = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with keyed_rng(CPU, 99):
            draws.append(torch.rand(8))
    with keyed_rng(CPU, 100):
        other = torch.rand(8)
    assert torch.equal(*draws)
    assert not torch.equal(draws[0], other)


def dropout_engine(seed: int) -> dtrain.Engine:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.5))
    torch.nn.init.ones_(model[0].weight)
    torch.nn.init.zeros_(model[0].bias)
    return dtrain.initialize(model, precision="fp32", optimizer=dtrain.AdamW(lr=0.0), seed=seed)


def masks(seed: int, steps: int = 2, noise: int = 0) -> list[torch.Tensor]:
    """The dropout masks of a run with two micro-batches a step."""
    engine, seen = dropout_engine(seed), []
    for step in range(steps):
        for _ in engine.accumulate(range(2)):
            torch.rand(noise)
            output = engine(torch.ones(64, 1))
            seen.append(output.detach() != 0)
            engine.backward(output.mean())
        if step == 0:
            with engine.eval():
                assert engine(torch.ones(64, 1)).all(), "no dropout"
        engine.step()
    return seen


def test_a_forward_is_keyed_by_seed_step_and_micro_batch_only() -> None:
    first = masks(3)
    assert all(torch.equal(a, b) for a, b in zip(first, masks(3, noise=7), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, masks(4), strict=True))
    assert len({tuple(mask.flatten().tolist()) for mask in first}) == 4
