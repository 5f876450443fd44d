"""The audit of one rank among many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import dtrain
from dtrain.checkpoint.format.device_fingerprint import fingerprint_tensor
from dtrain.checkpoint.format.fingerprint import MASK
from dtrain.parameters.compute_shard import ComputeShard
from dtrain.planning.ranks import NCCL, planned_ranks
from dtrain.planning.timeline import Timeline
from tests.helpers.many_ranks import planned_run

_CPU = torch.device("cpu")


def test_intervals_do_not_grow_with_the_ranks() -> None:
    model = ("model=tiny", "model.vocab_size=64", "precision=bf16")
    counts = []
    for ranks in (64, 1024):
        with planned_run(ranks, model=model).engine() as (engine, _):
            counts.append(len(list(engine.whole_compute_shards())))
            num_parameters = len(list(engine.module.parameters()))
    assert num_parameters < counts[1] <= counts[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_wholes_have_the_sums_of_their_parts_and_the_same_own_parts(precision: str, stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 160), nn.ReLU(), nn.Linear(160, 32))
    comm = planned_ranks(5, NCCL, _CPU, lambda _: None, Timeline(_CPU))
    engine = dtrain.initialize(
        model,
        engine=dtrain.Native(zero_stage=stage),
        optimizer=dtrain.AdamW(compile=False),
        precision=precision,
        comm=comm,
    )
    parts, wholes = list(engine.compute_shards()), list(engine.whole_compute_shards())
    assert _sums(parts) == _sums(wholes)
    assert list(_own(parts)) == list(_own(wholes))
    assert (stage in (1, 2)) == any(shard.is_gathered for shard in wholes)


def _sums(shards: list[ComputeShard]) -> Counter[tuple[str, str]]:
    gathered = [shard for shard in shards if shard.is_gathered]
    found: Counter[tuple[str, str]] = Counter()
    values = fingerprint_tensor([(shard.data, shard.start) for shard in gathered], _CPU).tolist()
    for shard, value in zip(gathered, values, strict=True):
        found[shard.kind, shard.name] = (found[shard.kind, shard.name] + value) & MASK
    return found


def _own(shards: list[ComputeShard]) -> Iterator[tuple[str, str, int, int]]:
    for shard in shards:
        if shard.source is not None:
            assert shard.source.numel() == shard.data.numel()
            yield shard.kind, shard.name, shard.start, shard.data.data_ptr()
