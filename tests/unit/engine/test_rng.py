"""Random numbers are keyed by what is computed, and the caller's generators are restored."""

from __future__ import annotations

import pytest
import torch

from dtrain.engine.rng import keyed_rng, rng_key
from tests.helpers.one_rank import start

CPU = torch.device("cpu")


def test_keys_of_a_run_all_differ_and_equal_those_of_earlier_versions() -> None:
    """Resuming an old run draws the numbers it would have drawn."""
    keys = {rng_key(seed, step, index) for seed in range(8) for step in range(64) for index in range(64)}
    assert len(keys) == 8 * 64 * 64
    assert all(0 <= key < 2**63 for key in keys)
    assert (rng_key(0, 0, 0), rng_key(11, 5, 3)) == (1195769770526638388, 8979783157863330958)


def test_one_key_gives_one_sequence_and_the_callers_state_is_restored_after_an_error_too() -> None:
    draws = []
    for seed, key in ((1, 99), (2, 99), (2, 100)):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        with keyed_rng(CPU, key):
            draws.append(torch.rand(8))
        with pytest.raises(IndexError), keyed_rng(CPU, key):
            torch.rand(3)[5]
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(*draws[:2])
    assert not torch.equal(draws[0], draws[2])


def masks(seed: int, noise: int = 0) -> list[torch.Tensor]:
    """The dropout masks of two steps with two micro-batches of two forwards each, such as two views of one sample."""
    engine = start(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.5)), seed=seed)
    seen = []
    for _ in range(2):
        for _ in engine.accumulate(range(2)):
            torch.rand(noise)
            outputs = [engine(torch.ones(64, 1)) for _ in range(2)]
            seen += [output.detach() != 0 for output in outputs]
            engine.backward((outputs[0] + outputs[1]).mean())
        engine.step()
    return seen


def test_a_forward_is_keyed_by_seed_step_micro_batch_and_number_only() -> None:
    first = masks(3)
    assert all(torch.equal(a, b) for a, b in zip(first, masks(3, noise=7), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, masks(4), strict=True))
    assert len({tuple(mask.flatten().tolist()) for mask in first}) == 8
