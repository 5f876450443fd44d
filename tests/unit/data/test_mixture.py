from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain.data import BatchLoader, SampleSource
from dtrain.data.mixture import BLOCK, Concatenation, HeldOut, Mixture, NotHeldOut, shares
from dtrain.data.sampling import Indices

WEIGHTS = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=5)


class Numbered(SampleSource):
    """Samples that say which they are."""

    num_samples = 0

    def __init__(self, name: int, count: int) -> None:
        self.name, self.num_samples = name, count

    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        assert 0 <= sample_ids.min() <= sample_ids.max() < self.num_samples
        ids = torch.from_numpy(sample_ids)
        return {"tokens": torch.stack((torch.full_like(ids, self.name), ids), dim=1)}


def mixture(counts: list[int], weights: list[float]) -> Mixture:
    return Mixture([Numbered(name, count) for name, count in enumerate(counts)], weights)


def samples(source: SampleSource, seed: int, indices: Indices) -> list[tuple[int, int]]:
    return [tuple(row) for row in source.batch(source.order(seed, indices))["tokens"].tolist()]


@settings(max_examples=15)
@given(st.integers(0, 5), st.integers(0, 50), WEIGHTS)
def test_each_block_has_shares_within_one_of_the_weights(seed: int, block: int, weights: list[float]) -> None:
    found = shares(weights)
    assert sum(found) == BLOCK
    for share, weight in zip(found, weights, strict=True):
        assert abs(share - weight / sum(weights) * BLOCK) < 1
    mixed = mixture([1000 + 7 * number for number in range(len(weights))], weights)
    rows = samples(mixed, seed, np.arange(block * BLOCK, (block + 1) * BLOCK))
    assert [sum(row[0] == name for row in rows) for name in range(len(weights))] == mixed.shares == found


@pytest.mark.parametrize(("counts", "weights"), [([3000, 4000], [0.3, 0.7]), ([617, 2500, 60], [1, 2, 0.5])])
def test_each_sample_of_a_folder_is_used_once_in_each_of_its_epochs(counts: list[int], weights: list[float]) -> None:
    mixed = mixture(counts, weights)
    rows = samples(mixed, 3, np.arange(4 * BLOCK))
    for name, count in enumerate(counts):
        own = [row[1] for row in rows if row[0] == name]
        epochs, rest = divmod(len(own), count)
        used = np.bincount(own, minlength=count)
        # whole epochs use each sample as often; the begun one uses some once more
        assert set(used.tolist()) <= {epochs, epochs + 1}
        assert int((used == epochs + 1).sum()) == rest


def test_the_order_is_mixed_and_another_one_for_another_seed_and_block() -> None:
    mixed = mixture([500, 500], [1, 1])
    first, second = (samples(mixed, 0, np.arange(start, start + 100)) for start in (0, BLOCK))
    assert 30 < sum(name for name, _ in first) < 70
    assert [name for name, _ in first] != [name for name, _ in second]
    assert first != samples(mixed, 1, np.arange(100))
    assert shares([1.0, 1e-6]) == [BLOCK, 0], "a weight too small for a block has no share"


@settings(max_examples=8)
@given(st.integers(0, 3), st.integers(0, 10**9), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_any_world_size_gives_the_same_stream(seed: int, cursor: int, world_sizes: list[int]) -> None:
    mixed = mixture([40, 90, 7], [0.5, 0.3, 0.2])
    want = samples(mixed, seed, np.arange(cursor, cursor + 12 * len(world_sizes)))
    got: list[tuple[int, int]] = []
    for world_size in world_sizes:  # a run that resumes each step with another number of ranks
        each = 12 // world_size
        steps = [next(BatchLoader(mixed, seed, 1, each, rank, world_size, cursor)) for rank in range(world_size)]
        got += [tuple(step[micro]["tokens"][0].tolist()) for micro in range(each) for step in steps]
        cursor += 12
    assert got == want


def test_a_batch_of_several_sources_keeps_its_rows() -> None:
    joined = Concatenation([Numbered(name, count) for name, count in enumerate((3, 1, 4))])
    assert joined.num_samples == 8
    ids = np.array([7, 0, 3, 2, 4, 3])
    assert joined.batch(ids)["tokens"].tolist() == [[2, 3], [0, 0], [1, 0], [0, 2], [2, 0], [1, 0]]


@settings(max_examples=40)
@given(st.integers(2, 400), st.data())
def test_samples_held_out_and_the_rest_are_disjoint_and_all_of_it(count: int, data: st.DataObject) -> None:
    num = data.draw(st.integers(1, count // 2))
    source = Numbered(0, count)
    held_out, rest = HeldOut(source, num, num), NotHeldOut(source, num)
    assert held_out.num_samples + rest.num_samples == count
    own = [row[1] for row in samples(held_out, 0, np.arange(num))]
    assert sorted(own + [row[1] for row in samples(rest, 5, np.arange(count - num))]) == list(range(count))
    assert sorted(own) == sorted(row[1] for row in samples(held_out, 9, np.arange(num)))
    fewer = data.draw(st.integers(1, num))
    some = [row[1] for row in samples(HeldOut(source, num, fewer), 0, np.arange(fewer))]
    assert len(set(some)) == fewer
    assert set(some) <= set(own)


def test_samples_held_out_are_spread_over_the_source_at_random() -> None:
    source = Numbered(0, 10_000)
    for count in (500, 37):
        held_out = HeldOut(source, 500, count).batch(np.arange(count))["tokens"][:, 1]
        assert (held_out.diff() > 0).all()
        assert held_out[0] < 300
        assert held_out[-1] > 9700
    places = HeldOut(source, 500, 500).batch(np.arange(500))["tokens"][:, 1] % 20
    assert (places.bincount(minlength=20) > 8).all()
