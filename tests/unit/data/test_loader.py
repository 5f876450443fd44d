from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dtrain.data import BatchLoader, PrefetchedBatches, SampleSource
from dtrain.data.sampling import Indices

CPU = torch.device("cpu")


class Slow(SampleSource):
    """Samples that are their own ids; each takes ``seconds``, and the one with id ``broken`` cannot be read."""

    def __init__(self, seconds: float = 0.0, broken: int = -1) -> None:
        self.seconds, self.broken = seconds, broken

    @property
    def num_samples(self) -> int:
        return 64

    def batch(self, sample_ids: Indices) -> dict[str, torch.Tensor]:
        time.sleep(self.seconds)
        if self.broken in sample_ids:
            raise OSError(f"sample {self.broken} cannot be read")
        return {"ids": torch.from_numpy(np.asarray(sample_ids))}


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


@pytest.mark.parametrize("global_batch_size", [8, 48, 80])  # 64 samples: in one epoch, on its border, more than one
def test_every_step_is_the_first_one_of_a_loader_that_starts_there(global_batch_size: int) -> None:
    source, num_micro_batches = Slow(), global_batch_size // 4
    for rank in (0, 1):
        loader = BatchLoader(source, 3, 2, num_micro_batches, rank, 2)
        for step in range(10):
            started = BatchLoader(source, 3, 2, num_micro_batches, rank, 2, cursor=step * global_batch_size)
            first = source.order(3, step * global_batch_size + 2 * rank + np.arange(2)).tolist()
            assert ids(next(loader)) == ids(batch := next(started))
            assert batch[0]["ids"].tolist() == first


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_batches_prepared_ahead_are_those_prepared_in_the_step(depth: int) -> None:
    source = Slow()
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
    source = Slow(seconds=0.02)  # a batch takes four times as long
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
    order = [ids(batch) for batch in (next(BatchLoader(Slow(), 3, 2, 4, cursor=8 * step)) for step in range(3))]
    broken = batches(Slow(broken=order[2][5]), depth)
    assert [ids(next(broken)) for _ in range(2)] == order[:2]
    with pytest.raises(OSError, match=f"sample {order[2][5]} cannot be read") as raised:
        next(broken)
    assert raised.traceback[-1].name == "batch"  # where it arose, in the other thread
    broken.close()
