"""Sums of gradients: always FP32, and in reproducible runs along one tree at every world size."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain.parameters.micro_batch_weight import RankWeights, Weight
from dtrain.sharding import accumulate, replica_sum
from dtrain.sharding.accumulate import RunningSum, TreeSum, add_scaled
from dtrain.sharding.layout import CHUNK
from dtrain.sharding.replica_sum import RunningReplicaSum, SubtreesInFlight, TreeReplicaSum

few = settings(max_examples=25)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
ONE = Weight(torch.ones(()), is_one=True)


def random_grads(number: int, seed: int, dtype: torch.dtype = torch.float32, numel: int = 16) -> list[Tensor]:
    """Gradients of very different sizes and both signs, so that the order of the sum shows."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-3, 4, (number, numel), generator=generator)
    return list((torch.randn(number, numel, generator=generator) * sizes).to(dtype).unbind())


def summed(kind: type[RunningSum | TreeSum], grads: list[Tensor], weights: list[float] | None = None) -> Tensor:
    """Returns the main grad, which starts as NaN."""
    main_grad = torch.full_like(grads[0], math.nan, dtype=torch.float32)
    gradient_sum = kind(main_grad)
    for grad, weight in zip(grads, weights or [1.0] * len(grads), strict=True):
        gradient_sum.push([grad], [Weight(torch.tensor(weight))])
    gradient_sum.finish()
    return main_grad


def by_recursion(grads: list[Tensor]) -> Tensor:
    """The same tree from the other end: split off the largest power of two below the number."""
    if len(grads) == 1:
        return grads[0].float()
    block = 1 << (len(grads) - 1).bit_length() - 1
    return by_recursion(grads[:block]) + by_recursion(grads[block:])


@few
@given(st.integers(1, 70), seeds, dtypes)
def test_is_the_balanced_tree(number: int, seed: int, dtype: torch.dtype) -> None:
    grads = random_grads(number, seed, dtype)
    assert torch.equal(summed(TreeSum, grads), by_recursion(grads))


@few
@given(st.integers(1, 6), st.integers(1, 8), seeds)
def test_any_world_size_gives_the_same_bits(per_rank: int, world: int, seed: int) -> None:
    """Micro-batch i of rank r has index i x world + r; the owner gets a row of every rank for each i."""
    grads = random_grads(per_rank * world, seed)
    output = torch.full((16,), math.nan)
    owner = TreeSum(output)
    for first in range(0, len(grads), world):
        owner.push(grads[first : first + world], [ONE] * world)
    owner.finish()
    assert torch.equal(output, summed(TreeSum, grads))


def test_the_order_would_show() -> None:
    """A control: on the same grads a running sum has other bits, and so has the tree over another order."""
    grads = random_grads(24, 0)
    assert not torch.equal(summed(TreeSum, grads), summed(RunningSum, grads))
    assert not torch.equal(summed(TreeSum, grads), summed(TreeSum, grads[1:] + grads[:1]))


@few
@given(st.integers(1, 20), seeds, dtypes)
def test_a_running_sum_adds_from_left_to_right(number: int, seed: int, dtype: torch.dtype) -> None:
    grads = random_grads(number, seed, dtype)
    assert torch.equal(summed(RunningSum, grads), functools.reduce(torch.add, [grad.float() for grad in grads]))


@few
@given(st.integers(1, 4), st.integers(1, 3), seeds, dtypes)
def test_several_gradients_at_once_are_added_one_by_one(world: int, rounds: int, seed: int, dtype: torch.dtype) -> None:
    """Over more elements than a block holds, weights of one and others mixed."""
    numel = 300
    all_grads = random_grads(world * rounds, seed, dtype, numel)
    weights = [ONE if i % 2 else Weight(torch.tensor(float(i + 3))) for i in range(len(all_grads))]
    one_by_one, together = torch.full((numel,), math.nan), torch.full((numel,), math.nan)
    first, second = RunningSum(one_by_one), RunningSum(together)
    for grad, weight in zip(all_grads, weights, strict=True):
        first.push([grad], [weight])
    with mock.patch.object(accumulate, "_CPU_BLOCK", 128):
        for start in range(0, len(all_grads), world):
            second.push(all_grads[start : start + world], weights[start : start + world])
    assert torch.equal(together, one_by_one)


def test_weights_of_one_are_known_only_in_host_memory() -> None:
    weights = RankWeights(torch.tensor([1.0, 2.0, 1.0]))
    assert [weight.is_one for weight in weights] == [True, False, True]
    assert [float(weight.value) for weight in weights] == [1.0, 2.0, 1.0]
    assert not any(weight.is_one for weight in RankWeights(torch.ones(2, device="meta"))), "no device memory is read"


def test_finish_starts_the_next_sum() -> None:
    first, second = random_grads(5, 1), random_grads(3, 2)
    for kind, want in ((TreeSum, by_recursion(second)), (RunningSum, second[0] + second[1] + second[2])):
        main_grad = torch.full((16,), math.nan)
        gradient_sum = kind(main_grad)
        gradient_sum.finish()
        assert torch.equal(main_grad, torch.zeros(16)), "nothing was pushed"
        for grads in (first, second):
            for grad in grads:
                gradient_sum.push([grad], [ONE])
            gradient_sum.finish()
        assert torch.equal(main_grad, want)
        gradient_sum.finish()
        assert torch.equal(main_grad, torch.zeros(16)), "a step without a gradient keeps nothing of the last one"


@few
@given(dtypes, st.sampled_from([1.0, 3.0, 4097.0, 1e-4, 1e6]), seeds)
def test_weights_are_applied_in_fp32(dtype: torch.dtype, weight: float, seed: int) -> None:
    grad = random_grads(1, seed, dtype)[0]
    before = grad.clone()
    want = grad.float() * torch.tensor(weight)
    assigned, added = torch.empty(16), torch.zeros(16)
    add_scaled([assigned], [grad], Weight(torch.tensor(weight)), is_first=True)
    add_scaled([added], [grad], Weight(torch.tensor(weight)))
    for got in (
        assigned,
        added,
        summed(TreeSum, [grad], [weight]),
        summed(RunningSum, [grad], [weight]),
        summed(RunningSum, [torch.zeros_like(grad), grad], [1.0, weight]),
    ):
        assert got.dtype == torch.float32
        assert torch.equal(got, want)
    assert torch.equal(grad, before), "the gradient belongs to the caller"


@pytest.mark.parametrize("ranks", [1, 3])
def test_norms_are_taken_with_the_last_gradients_of_a_step(ranks: int) -> None:
    numel = 3 * (1 << 17) + 5 * CHUNK  # several blocks, the last one shorter
    main_grad = torch.empty(numel)
    total = RunningSum(main_grad)
    for step in range(2):
        for micro_batch in range(2):
            grads = random_grads(ranks, step + micro_batch, torch.float32, numel)
            total.push(grads, [ONE] * ranks, is_last=micro_batch == 1)
            assert (total.norms is None) == (micro_batch == 0)
        total.finish()
        assert torch.equal(total.norms, main_grad.view(-1, CHUNK).norm(dim=1))
    total.finish()  # a step without gradients
    assert total.norms is None
    assert not main_grad.any()


NUMEL = 120


class FakeReplicas:
    """The replicas' communicator on one rank; ``sent`` is shared by the ranks, which push in turns."""

    def __init__(self, rank: int, world_size: int, sent: dict[int, dict[int, Tensor]]) -> None:
        self.rank, self.world_size = rank, world_size
        self._sent = sent
        self._number = 0

    def all_to_all(self, output: Tensor, input: Tensor, *_: Any, **__: Any) -> Any:
        sent = self._sent[self._number]
        sent[self.rank] = input
        self._number += 1

        def wait() -> None:
            for rank, row in enumerate(output.view(self.world_size, -1)):
                row.copy_(sent[rank].view(self.world_size, -1)[self.rank])

        return SimpleNamespace(wait=wait)


@pytest.mark.parametrize(
    ("shard_size", "num_replicas", "num_micro_batches"), [(2, 2, 1), (2, 3, 4), (4, 5, 3), (4, 2, 3), (2, 5, 1)]
)
def test_the_tree_is_that_of_all_ranks(shard_size: int, num_replicas: int, num_micro_batches: int) -> None:
    """Also if a tree over the replicas has leftovers, in two steps, and with weights."""
    generator = torch.Generator().manual_seed(shard_size)
    world = shard_size * num_replicas
    sent: dict[int, dict[int, Tensor]] = defaultdict(dict)
    shards = [torch.empty(NUMEL) for _ in range(num_replicas)]
    comms: list[Any] = [FakeReplicas(replica, num_replicas, sent) for replica in range(num_replicas)]
    sums = [TreeReplicaSum(comm, shard, "g", SubtreesInFlight()) for comm, shard in zip(comms, shards, strict=True)]
    expected = torch.empty(NUMEL)
    whole = TreeSum(expected)
    for _ in range(2):
        for _ in range(num_micro_batches):
            grads = list(torch.randn(world, NUMEL, generator=generator).bfloat16())
            weights = [Weight(value, is_one=False) for value in torch.rand(world, generator=generator)]
            whole.push(grads, weights)
            for replica, own in enumerate(sums):
                ranks = slice(replica * shard_size, (replica + 1) * shard_size)
                own.push(grads[ranks], weights[ranks])
        whole.finish()
        for replica, own in enumerate(sums):
            own.finish()
            parts = (shard.view(num_replicas, -1)[replica] for shard in (shards[replica], expected))
            assert torch.equal(*parts), f"replica {replica}"


def test_a_part_of_an_empty_shard_lies_in_the_shard() -> None:
    """Ranks of one host read it at its offset, in memory that may end there."""
    comm: Any = FakeReplicas(1, 2, {})
    empty = torch.zeros(8)[8:]
    assert RunningReplicaSum(comm, empty, "empty")._part.storage_offset() == 8
    assert TreeReplicaSum(comm, empty, "empty", SubtreesInFlight())._part.storage_offset() == 8


@pytest.mark.parametrize("limit", [0, 3 * 4 * NUMEL, 1 << 30])
def test_what_the_buffers_have_in_flight_is_limited(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are received first, whichever buffer's; the sums stay the same."""
    monkeypatch.setattr(replica_sum, "MAX_BYTES_IN_FLIGHT", limit)
    in_flight, sent = SubtreesInFlight(), defaultdict(dict)
    comm: Any = FakeReplicas(0, 1, sent)
    shards = [torch.empty(NUMEL) for _ in range(5)]
    sums = [TreeReplicaSum(comm, shard, str(n), in_flight) for n, shard in enumerate(shards)]
    for step in range(2):
        for number, own in enumerate(sums):
            own.push([torch.full((NUMEL,), float(number + step))] * 2, [Weight(torch.ones(()), is_one=True)] * 2)
            assert in_flight._nbytes <= max(limit, 4 * NUMEL)
    for number, (own, shard) in enumerate(zip(sums, shards, strict=True)):
        own.finish()
        assert (shard == 2 * number + 2 * (number + 1)).all()
    assert in_flight._nbytes == 0
