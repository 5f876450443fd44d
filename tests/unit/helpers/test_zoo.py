"""The zoo is worth something only if plain torch trains every model in it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from tests.helpers.oracle import AdamWSettings, Oracle, normwise_error
from tests.helpers.zoo import ZOO, ZooEntry

entries = pytest.mark.parametrize("entry", ZOO.values(), ids=ZOO)


def seed(step: int, index: int) -> None:
    torch.manual_seed(index)


@entries
def test_oracle_trains_it(entry: ZooEntry) -> None:
    model = entry.build(0)
    assert sum(p.numel() for p in model.parameters()) < 5000
    pairs = [(entry.batch(index), 1.0 + index) for index in range(2)]
    oracle = Oracle(model, optimizer=AdamWSettings(lr=1e-2), loss=entry.loss, before_forward=seed)
    outcomes = [oracle.step(pairs) for _ in range(6)]
    assert all(outcome.applied for outcome in outcomes)
    assert outcomes[-1].loss < outcomes[0].loss
    unused = {name for name, gradient in outcomes[0].gradients.items() if not gradient.any()}
    expected = {"unused": {"unused", "unused_layer.weight", "unused_layer.bias"}, "odd_sizes": {"empty"}}
    assert unused == expected.get(entry.name, set())
    if not entry.has_dropout:
        double = Oracle(entry.build(0), loss=entry.loss, dtype=torch.float64).step(pairs)
        assert all(gradient.dtype == torch.float64 for gradient in double.gradients.values())
        assert 0 < normwise_error(outcomes[0].gradients, double.gradients) < 1e-5


@entries
def test_weights_and_batches_are_functions_of_their_number(entry: ZooEntry) -> None:
    state = torch.get_rng_state()
    again = pickle.loads(pickle.dumps(entry))
    assert torch.equal(state, torch.get_rng_state())
    first, second, other = entry.build(3).state_dict(), again.build(3).state_dict(), entry.build(4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert same(entry.batch(5), again.batch(5))
    assert not same(entry.batch(5), entry.batch(6))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@entries
def test_traits_are_true(entry: ZooEntry) -> None:
    model = entry.build(0)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    losses = [entry.loss(model, entry.batch(index)).item() for index in (0, 1, 0)]
    # equal in spite of a forward between: no loss depends on a buffer that is written
    assert (losses[0] == losses[2]) is not entry.has_dropout
    assert all(torch.equal(before[name], after) for name, after in model.named_buffers()) is not entry.writes_buffers
