"""The vote and the audit of one rank among 1,024, none of which is started: bytes, and what they cost its host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dtrain
from dtrain.checkpoint.format.device_fingerprint import fingerprint_tensor
from dtrain.checkpoint.format.fingerprint import MASK
from dtrain.engine.vote.divergence import texts_of
from dtrain.engine.vote.record import NUM_FIELDS, DeviceRecord, HostRecord
from dtrain.parameters.compute_shard import ComputeShard
from dtrain.planning.record.ranks import NCCL, planned_ranks
from dtrain.planning.record.recorder import StepRecorder
from tests.helpers.many_ranks import Texts, planned_run, seconds, vote_host_work, vote_rows

RANKS = 1024
CPU = torch.device("cpu")
_TINY = ("model=tiny", "model.num_layers=2", "model.vocab_size=64", "precision=bf16")


def test_a_step_gathers_one_row_of_each_rank() -> None:
    ranks = 64
    transfers = [one.transfer for one in planned_run(ranks, model=_TINY).record().steps[1].transfers.values()]
    received = [transfer.nbytes for transfer in transfers if transfer.op == "gather_rows"]
    assert received == [(ranks - 1) * (NUM_FIELDS + 1) * 8]  # a bit for each of up to 64 parameters


@pytest.mark.parametrize("kind", [HostRecord, DeviceRecord])
def test_the_host_makes_no_object_for_each_rank(kind: type[Any]) -> None:
    made: list[Sequence[int]] = []
    original = kind.from_row.__func__

    def from_row(cls: type[Any], row: Sequence[int]) -> Any:
        made.append(row)
        return original(cls, row)

    run = vote_host_work(vote_rows(RANKS))
    with mock.patch.object(kind, "from_row", classmethod(from_row)):
        run()
    assert len(made) < 8


def test_the_host_decides_in_less_than_a_hundredth_of_a_second() -> None:
    few, many = (vote_host_work(vote_rows(ranks)) for ranks in (RANKS // 16, RANKS))
    few(), many()  # the first calls import and allocate
    few_s, many_s = seconds(few, many, rounds=25)
    assert many_s < 0.01, "1 % of a step of one second"
    assert many_s < 3 * few_s, "most of it does not depend on the number of ranks"


@pytest.mark.parametrize(("rank", "sent"), [(0, "{}"), (5, ""), (7, "{}")])
def test_only_two_ranks_send_what_differs(rank: int, sent: str) -> None:
    comm = Texts(RANKS)
    comm.rank = rank
    assert texts_of(comm, "{}", 7) == (sent, sent)


def test_intervals_do_not_grow_with_the_ranks() -> None:
    counts = []
    for ranks in (64, 1024):
        with planned_run(ranks, model=_TINY).engine() as (engine, _):
            counts.append(len(list(engine.states.whole_compute_shards())))
            num_parameters = len(list(engine.module.parameters()))
    assert num_parameters < counts[1] <= counts[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_wholes_have_the_sums_of_their_parts_and_the_same_own_parts(precision: str, stage: int) -> None:
    model = nn.Sequential(nn.Linear(96, 160), nn.ReLU(), nn.Linear(160, 32))
    comm = planned_ranks(5, NCCL, CPU, StepRecorder())
    options: dict[str, Any] = {"zero_stage": stage, "precision": precision, "comm": comm}
    engine = dtrain.initialize(model, optimizer=dtrain.AdamW(compile=False), **options)
    parts, wholes = list(engine.states.compute_shards()), list(engine.states.whole_compute_shards())
    assert _sums(parts) == _sums(wholes)
    assert list(_own(parts)) == list(_own(wholes))
    assert (stage in (1, 2)) == any(shard.is_gathered for shard in wholes)


def _sums(shards: list[ComputeShard]) -> Counter[tuple[str, str]]:
    gathered = [shard for shard in shards if shard.is_gathered]
    found: Counter[tuple[str, str]] = Counter()
    values = fingerprint_tensor([(shard.data, shard.start) for shard in gathered], CPU).tolist()
    for shard, value in zip(gathered, values, strict=True):
        found[shard.kind, shard.name] = (found[shard.kind, shard.name] + value) & MASK
    return found


def _own(shards: list[ComputeShard]) -> Iterator[tuple[str, str, int, int]]:
    for shard in shards:
        if shard.source is not None:
            assert shard.source.numel() == shard.data.numel()
            yield shard.kind, shard.name, shard.start, shard.data.data_ptr()
