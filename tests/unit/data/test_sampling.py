"""The order of samples, and batches in that order: at any world size, from any cursor, prepared ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtrain.data import BatchLoader, PrefetchedBatches, SampleSource, sample_id, sample_ids, sampling
from dtrain.data.loader import validation_batches
from dtrain.data.sampling import Indices

quick = settings(max_examples=40)


class Numbers(SampleSource):
    """Samples that are their own numbers; each takes ``seconds``, and the one with number ``broken`` cannot be read."""

    num_samples = 0

    def __init__(self, num_samples: int, seconds: float = 0.0, broken: int = -1) -> None:
        self.num_samples, self.seconds, self.broken = num_samples, seconds, broken

    def batch(self, sample_ids: Indices) -> dict[str, torch.Tensor]:
        time.sleep(self.seconds)
        if self.broken in sample_ids:
            raise OSError(f"sample {self.broken} cannot be read")
        return {"ids": torch.from_numpy(sample_ids)}


def epoch_order(seed: int, epoch: int, num_samples: int) -> list[int]:
    start = epoch * num_samples
    return sample_ids(seed, np.arange(start, start + num_samples), num_samples).tolist()


@quick
@given(st.integers(0, 2**70), st.integers(0, 10**6), st.integers(1, 3000))
def test_each_sample_is_used_exactly_once_per_epoch(seed: int, epoch: int, num_samples: int) -> None:
    assert sorted(epoch_order(seed, epoch, num_samples)) == list(range(num_samples))


@quick
@given(st.integers(0, 10**9), st.integers(0, 10**12), st.integers(1, 10**12))
@example(0, 0, 10**12)  # more than 32 bits
def test_one_index_at_a_time_gives_the_vectorized_order(seed: int, first: int, num_samples: int) -> None:
    indices = np.arange(first, first + 8)
    ids = sample_ids(seed, indices, num_samples)
    assert [sample_id(seed, int(i), num_samples) for i in indices] == ids.tolist()
    assert ids.min() >= 0
    assert ids.max() < num_samples
    assert (sample_ids(seed, indices.reshape(2, 4), num_samples) == ids.reshape(2, 4)).all()


def test_epochs_and_seeds_have_different_orders_one_after_the_other() -> None:
    orders = [tuple(epoch_order(seed, epoch, 1000)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == len(orders)
    assert tuple(sample_ids(1, np.arange(3000), 1000).tolist()) == sum(orders[3:6], ())


def test_the_order_is_well_shuffled() -> None:
    order = np.array(epoch_order(0, 0, 4096))
    # neighbors of a random order are a third of the range apart on average; standard error 15
    assert abs(np.abs(np.diff(order)).mean() - 4096 / 3) < 75
    # as many descents as ascents; standard deviation 18
    assert abs((np.diff(order) < 0).sum() - 2048) < 95
    places = [sample_id(seed, 0, 10) for seed in range(2000)]
    assert np.bincount(places, minlength=10).min() > 140  # 200 expected, standard deviation 13


def test_the_order_is_the_same_in_every_release() -> None:
    # resumed runs depend on it: change these numbers only with a new checkpoint format
    assert epoch_order(0, 0, 10) == [4, 5, 7, 9, 2, 0, 8, 6, 1, 3]
    assert sample_id(7, 123_456_789_012, 10**9) == 155534579


BILLION = 10**9


@pytest.mark.parametrize("cursor", [0, BILLION - 12, 10**15 + 5], ids=str)
def test_a_loader_resumes_at_any_cursor_at_once(cursor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch ends at one of them. To shuffle or to skip would take minutes, and gigabytes."""
    computed, feistel = 0, sampling._feistel

    def counted(values: Any, *rest: Any) -> Any:
        nonlocal computed
        computed += values.size
        return feistel(values, *rest)

    expected = [sample_id(5, index, BILLION) for index in range(cursor, cursor + 24)]
    monkeypatch.setattr(sampling, "_feistel", counted)
    loaders = [BatchLoader(Numbers(BILLION), 5, 4, 3, rank, 2, cursor) for rank in range(2)]
    batches = [next(loader) for loader in loaders]
    assert computed < 10_000  # some steps are put in order at once; the few places outside of the range are walked on
    assert torch.cat([batches[rank][micro]["ids"] for micro in range(3) for rank in range(2)]).tolist() == expected
    assert len(set(expected)) == 24
    assert {loader.cursor for loader in loaders} == {cursor + 24}


def consumed(world: int, steps: int, num_micro_batches: int, micro_batch_size: int, cursor: int) -> list[int]:
    """All samples of ``steps`` steps in global order, from the loaders of all ranks."""
    sizes = micro_batch_size, num_micro_batches
    loaders = [BatchLoader(Numbers(101), 5, *sizes, rank, world, cursor) for rank in range(world)]
    found: list[int] = []
    for _ in range(steps):
        batches = [next(loader) for loader in loaders]
        assert len(batches[0]) == num_micro_batches
        found += chain.from_iterable(ids(list(together)) for together in zip(*batches, strict=True))
    assert {loader.cursor for loader in loaders} == {cursor + len(found)}
    return found


def test_loaders_of_any_world_size_and_a_run_resumed_at_another_batch_size_consume_one_stream() -> None:
    stream = sample_ids(5, np.arange(96), 101).tolist()
    for world in (1, 2, 3, 8):
        assert consumed(world, steps=2, num_micro_batches=24 // world, micro_batch_size=2, cursor=0) == stream
    large = consumed(world=2, steps=3, num_micro_batches=30, micro_batch_size=2, cursor=96)  # each more than an epoch
    assert large == sample_ids(5, np.arange(96, 96 + 360), 101).tolist()
    first = consumed(world=4, steps=3, num_micro_batches=1, micro_batch_size=2, cursor=0)
    second = consumed(world=3, steps=4, num_micro_batches=2, micro_batch_size=5, cursor=len(first))
    assert first + second == sample_ids(5, np.arange(len(first + second)), 101).tolist()
    assert sorted((first + second)[:101]) == list(range(101))


@quick
@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 10), st.sampled_from([1, 2, 3, 4, 8]))
def test_validation_is_the_same_at_any_world_size(n: int, micro_batch_size: int, num_batches: int, world: int) -> None:
    shares = [list(validation_batches(Numbers(n), micro_batch_size, num_batches, r, world)) for r in range(world)]
    assert len({len(share) for share in shares}) == 1
    merged = [item for together in zip(*shares, strict=True) for item in together]
    real = [batch["ids"].tolist() for batch, counts in merged if counts]
    alone = [batch["ids"].tolist() for batch, _ in validation_batches(Numbers(n), micro_batch_size, num_batches)]
    assert real == alone
    used = list(chain.from_iterable(real))
    assert len(set(used)) == len(used) == min(n, num_batches * micro_batch_size)
    assert all(1 <= len(batch["ids"]) <= micro_batch_size for batch, _ in merged)  # what does not count runs too


CPU = torch.device("cpu")


def batches(source: SampleSource, depth: int, cursor: int = 0) -> PrefetchedBatches:
    return PrefetchedBatches(BatchLoader(source, 3, 2, 4, cursor=cursor), depth, CPU)


def ids(batch: list[dict[str, torch.Tensor]]) -> list[int]:
    return [index for micro in batch for index in micro["ids"].tolist()]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 5
    while any(thread.name.startswith("dtrain-data") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread that prepares batches has not ended"
        time.sleep(0.01)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_batches_prepared_ahead_are_those_prepared_in_the_step(depth: int) -> None:
    source = Numbers(64)
    plain = BatchLoader(source, 3, 2, 4, cursor=16)
    ahead = batches(source, depth, cursor=16)
    for step in range(1, 10):
        assert ids(next(ahead)) == ids(next(plain))
        assert ahead.cursor == 16 + 8 * step  # what was handed out, however much is prepared
    ahead.close()
    resumed = batches(source, depth, cursor=ahead.cursor)
    assert ids(next(resumed)) == ids(next(plain))
    resumed.close()


def test_a_batch_is_prepared_while_the_step_runs_and_the_wait_for_it_is_counted() -> None:
    source = Numbers(64, seconds=0.02)  # a batch takes four times as long
    ahead, direct = batches(source, depth=1), batches(source, depth=0)
    for stream in (ahead, direct):
        next(stream)
        assert stream.waited_s > 0.07
    while not ahead._ahead[0].done():  # the step
        time.sleep(0.01)
    next(ahead)
    assert ahead.waited_s < 0.07
    ahead.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_is_raised_by_the_step_that_needs_the_batch(depth: int) -> None:
    order = [ids(batch) for batch in (next(BatchLoader(Numbers(64), 3, 2, 4, cursor=8 * step)) for step in range(3))]
    broken = batches(Numbers(64, broken=order[2][5]), depth)
    assert [ids(next(broken)) for _ in range(2)] == order[:2]
    with pytest.raises(OSError, match=f"sample {order[2][5]} cannot be read") as raised:
        next(broken)
    assert raised.traceback[-1].name == "batch"  # where it arose, in the other thread
    broken.close()
