"""Batches whose sizes change: the same samples in the same order, none lost; rows are contexts of their own."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from dtrain.config.growth import BatchGrowth
from dtrain.data import BatchLoader, PrefetchedBatches, SampleSource
from dtrain.data.growing import GrowingBatches, cut_rows
from dtrain.data.packing import pack_documents
from dtrain.data.sampling import Indices
from dtrain.data.token_samples import PackedDocuments, ShardWindows, mean_context
from tests.helpers.token_shards import MemoryShards

LENGTH, MICRO, WORLD = 16, 2, 2
GROWTH = BatchGrowth.of({0: 8, 3: 16, 7: 4}, {0: 4, 2: 8, 5: 16}, LENGTH)
CPU = torch.device("cpu")


class Numbered(SampleSource):
    """Samples whose tokens name the sample and the place in it."""

    num_samples = 41

    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        tokens = torch.from_numpy(sample_ids[:, None] * LENGTH + np.arange(LENGTH))
        return {"tokens": tokens, "targets": tokens + 1}


def growing(rank: int, step: int = 0, world: int = WORLD) -> GrowingBatches:
    cursor = GROWTH.num_tokens(0, step) // LENGTH
    # made as in a run: with the number of micro-batches of the step
    number = GROWTH.at(step).global_batch_size // (MICRO * world)
    return GrowingBatches(BatchLoader(Numbered(), 3, MICRO, number, rank, world, cursor), GROWTH, step)


@pytest.mark.parametrize(("depth", "start"), [(0, 0), (1, 2), (3, 3), (1, 6)])
def test_a_step_has_its_size_however_far_ahead_it_is_prepared(depth: int, start: int) -> None:
    streams = [PrefetchedBatches(growing(rank, start), depth, CPU) for rank in range(WORLD)]
    cursor = GROWTH.num_tokens(0, start) // LENGTH
    for step in range(start, 10):
        phase, batches = GROWTH.at(step), [next(stream) for stream in streams]
        samples = Numbered().order(3, cursor + np.arange(phase.global_batch_size))
        cursor += phase.global_batch_size
        assert [stream.cursor for stream in streams] == [cursor, cursor]
        # micro-batch i of rank r is the (i x world + r)-th of the step
        in_order = [micro for several in zip(*batches, strict=True) for micro in several]
        whole = Numbered().batch(samples)
        for name in ("tokens", "targets"):
            assert all(micro[name].shape == (MICRO * LENGTH // phase.seq_len, phase.seq_len) for micro in in_order)
            assert torch.equal(torch.cat([micro[name] for micro in in_order]).view(-1, LENGTH), whole[name])
    for stream in streams:
        stream.close()
    shapes = {micro["tokens"].shape for stream in [growing(0)] for _ in range(20) for micro in next(stream)}
    assert shapes == {(8, 4), (4, 8), (2, 16)}, "one for each length"


DOCUMENTS = [5, 21, 2, 9, 16, 1, 11, 30, 3, 7]


@pytest.mark.parametrize("is_packed", [False, True])
def test_positions_restart_with_rows_and_documents(is_packed: bool) -> None:
    shards, plan = MemoryShards(DOCUMENTS), pack_documents(np.cumsum(DOCUMENTS), LENGTH)
    source = PackedDocuments(shards, plan, LENGTH) if is_packed else ShardWindows(shards, LENGTH, True)  # type: ignore[arg-type]
    whole = source.batch(np.arange(source.num_samples))
    rows = cut_rows(whole, 4)
    assert torch.equal(rows["targets"].flatten(), whole["targets"].flatten())
    before = whole["positions"].flatten().tolist()
    expected: list[int] = []
    for place, position in enumerate(before):
        expected.append(0 if place % 4 == 0 or position == 0 else expected[-1] + 1)
    assert rows["positions"].flatten().tolist() == expected
    lengths = [expected[place : place + 4] for place in range(0, len(expected), 4)]
    # a document of n tokens is the context of each of them
    contexts = [length for row in lengths for length in _documents(row) for _ in range(length)]
    assert mean_context(source, 4) == pytest.approx(sum(contexts) / len(contexts))


def _documents(positions: list[int]) -> list[int]:
    begins = [place for place, position in enumerate(positions) if position == 0]
    return [end - begin for begin, end in pairwise([*begins, len(positions)])]
