"""Matrices on their way to their owners and back, over ranks that are threads."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain.distributed.communicator import Handle
from dtrain.distributed.transport.single_rank import Completed
from dtrain.optim import matrix
from dtrain.optim.matrix import MatrixShard, MatrixUpdate
from dtrain.optim.owners import Matrix, MatrixInterval, MatrixPlan, assign_owners, matrices_of
from dtrain.optim.rule import MatrixRule, StateSpec, UpdateClass, UpdateGroup, UpdateScalars, UpdateSlice
from tests.helpers.checkpoints import ThreadCommunicator, on_threads

SCALARS = UpdateScalars(0.5, 1, torch.tensor(1.0), torch.tensor(0.0))


def cost(shape: tuple[int, int]) -> float:
    return float(max(shape) * min(shape) ** 2)


SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 40))


@settings(max_examples=30)
@given(st.lists(SHAPES, min_size=1, max_size=12), st.integers(1, 5), st.randoms())
def test_owners_are_balanced_and_depend_on_the_shapes_alone(
    shapes: list[tuple[int, int]], world: int, rng: Any
) -> None:
    matrices = [Matrix(f"m{n}", 0, shape) for n, shape in enumerate(shapes)]
    owners = assign_owners(matrices, cost, world)
    assert assign_owners(rng.sample(matrices, len(matrices)), cost, world) == owners
    loads = [sum(cost(m.shape) for m, owner in owners.items() if owner == rank) for rank in range(world)]
    # the last matrix of the busiest rank went to the rank with the least
    busiest = loads.index(max(loads))
    least = min((cost(m.shape) for m, owner in owners.items() if owner == busiest), default=0.0)
    assert loads[busiest] - least <= sum(loads) / world + 1e-9


def test_the_most_expensive_matrix_goes_first() -> None:
    shapes = [(1, 3), (1, 3), (1, 2), (1, 2), (1, 2)]  # any other order would leave 7 and 5
    owners = assign_owners([Matrix(f"m{n}", 0, shape) for n, shape in enumerate(shapes)], lambda s: s[1], 2)
    assert [owner for _, owner in sorted(owners.items())] == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("held", [[(0, 4)], [(0, 4), (3, 6)], [(0, 4), (5, 6)], [(1, 6)], [(0, 6), (0, 6)]])
def test_intervals_that_do_not_tile_a_matrix_are_refused(held: list[tuple[int, int]]) -> None:
    one = Matrix("m", 0, (2, 3))
    intervals = [[MatrixInterval(one, *bounds)] for bounds in held] + [[]]
    with pytest.raises(ValueError, match=r"expected a tiling, or all of it on each"):
        MatrixPlan(intervals, {one: 0}, 0)


def test_rows_of_a_split_must_be_those_of_the_parameter() -> None:
    with pytest.raises(ValueError, match=r"'w' has 5 rows, and is split into \[2, 2\]"):
        matrices_of("w", (5, 2), (2, 2))


def test_memory_of_a_plan_does_not_grow_with_the_square_of_the_ranks() -> None:
    """Each rank computes the plan of all owners; here each holds an equal part of one matrix."""
    peaks = []
    for ranks in (256, 1024):
        (one,) = matrices_of("weight", [ranks, 4])
        held = [[MatrixInterval(one, 4 * rank, 4 * rank + 4)] for rank in range(ranks)]
        owners = assign_owners([one], lambda shape: float(shape[0]), ranks)
        tracemalloc.start()
        assert MatrixPlan(held, owners, 0).total == 4 * (ranks - 1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 6 * peaks[0]


class Ranks(ThreadCommunicator):
    """Counts the elements that it receives from other ranks; new memory is NaN."""

    num_received = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        sizes: Sequence[Any] = self._swap(numel)
        assert len(set(sizes)) == 1, "a transport allocates as much on every rank"
        return torch.full((numel,), math.nan, dtype=dtype)

    def _swap(self, value: Any) -> list[Any]:
        board: list[Any] = self._board
        board[self.rank] = value
        self._barrier.wait()
        values = list(board)
        self._barrier.wait()
        return values

    def all_to_all(
        self, output: Tensor, input: Tensor, output_sizes: Any, input_sizes: Any, *, total: int, label: str
    ) -> Handle:
        values = self._swap((input.clone(), list(input_sizes), total))
        assert total == values[0][2] == sum(sum(sizes) for _, sizes, _ in values)
        parts = [source.split(sizes)[self.rank] for source, sizes, _ in values]
        assert [part.numel() for part in parts] == list(output_sizes)
        assert not parts[self.rank].numel(), "what an owner holds is not sent"
        output.copy_(torch.cat(parts))
        self.num_received += output.numel()
        return Completed()

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str) -> Handle:
        output.copy_(torch.cat(self._swap(shard.clone())))
        self.num_received += output.numel() - shard.numel()
        return Completed()


class Turned(MatrixRule):
    """Moves each element by the one opposite in the matrix, plus the matrix's rows; the state sums the gradients."""

    states = (StateSpec("sum"),)

    def __init__(self, splits: dict[str, tuple[int, ...]]) -> None:
        self.splits = splits

    def begin(self, group: UpdateGroup, grads: list[Tensor], outputs: list[Tensor], scalars: UpdateScalars) -> None:
        for grad, state, output in zip(grads, *group.states, outputs, strict=True):
            state.add_(grad)
            output.copy_(grad)

    def transform(self, matrix: Tensor) -> Tensor:
        return matrix.flip(0, 1) + matrix.size(0)

    def finish(
        self, group: UpdateGroup, moves: list[Tensor], shapes: list[tuple[int, int]], scalars: UpdateScalars
    ) -> None:
        for master, move, shape in zip(group.masters, moves, shapes, strict=True):
            master.add_(move, alpha=scalars.lr).add_(shape[1])

    def cost(self, shape: tuple[int, int]) -> float:
        return cost(shape)


@dataclass
class Weight:
    """A parameter; ``held`` are the ranks of the intervals between ``cuts``, or None if every rank holds all."""

    name: str
    shape: tuple[int, int]
    sizes: tuple[int, ...]
    cuts: list[int]
    held: list[int] | None

    def grad(self) -> Tensor:
        generator = torch.Generator().manual_seed(len(self.name) + self.shape[0])
        return torch.randint(100, (self.shape[0] * self.shape[1],), generator=generator).float()  # exact in BF16

    def expected(self, lr: float) -> Tensor:
        parts = self.grad().view(self.shape).split(self.sizes)
        return torch.cat([((part.flip(0, 1) + part.size(0)) * lr + part.size(1)).flatten() for part in parts])

    def intervals(self, rank: int) -> list[tuple[int, int]]:
        if self.held is None:
            return [(0, self.shape[0] * self.shape[1])]
        bounds = [0, *self.cuts, self.shape[0] * self.shape[1]]
        return [pair for pair, holder in zip(itertools.pairwise(bounds), self.held, strict=True) if holder == rank]


@st.composite
def weights(draw: st.DrawFn, world: int) -> list[Weight]:
    found = []
    for number in range(draw(st.integers(1, 5))):
        rows, columns = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
        splits = sorted(draw(st.sets(st.integers(1, rows - 1), max_size=2))) if rows > 1 else []
        sizes = tuple(b - a for a, b in itertools.pairwise([0, *splits, rows]))
        cuts = sorted(draw(st.sets(st.integers(1, rows * columns - 1), max_size=4))) if rows * columns > 1 else []
        holders = st.lists(st.integers(0, world - 1), min_size=len(cuts) + 1, max_size=len(cuts) + 1)
        held = None if draw(st.booleans()) else draw(holders)
        found.append(Weight(f"w{number}", (rows, columns), sizes, cuts, held))
    return found


def run(comm: Any, chosen: list[Weight], lr_factor: float) -> tuple[int, int]:
    """Checks two updates; returns the elements received in one, and those of the buffers."""
    try:
        return checked_updates(comm, chosen, lr_factor)
    except BaseException:
        comm._barrier.abort()  # the other ranks would wait
        raise


def checked_updates(comm: ThreadCommunicator, chosen: list[Weight], lr_factor: float) -> tuple[int, int]:
    ranks = Ranks(comm.rank, comm.world_size, comm._barrier, comm._board)
    shards, wanted = [], []
    for weight in chosen:
        for low, high in weight.intervals(comm.rank):
            numel = high - low
            master, state = torch.zeros(2, numel)
            grad, replica = torch.full((numel,), math.nan), torch.empty(numel, dtype=torch.bfloat16)
            part = UpdateSlice(UpdateClass(0, 0.0, lr_factor), (0, 0), master, grad, (state,), replica)
            shards.append(MatrixShard(weight.name, weight.shape, low, part))
            wanted.append((weight.grad()[low:high], weight.expected(0.5 * lr_factor)[low:high]))
    rule = Turned({weight.name: weight.sizes for weight in chosen})
    update = MatrixUpdate(rule, [shards[:1], shards[1:]], ranks)
    for count in (1, 2):
        ranks.num_received = 0
        update.begin(SCALARS, [grad.clone() for grad, _ in wanted])
        update.update([1], SCALARS)
        for shard, (_, move) in zip(shards[:1], wanted[:1], strict=True):
            assert torch.equal(shard.part.master, (count - 1) * move)
        update.update([0], SCALARS)
        for shard, (grad, move) in zip(shards, wanted, strict=True):
            assert torch.equal(shard.part.master, count * move)
            assert torch.equal(shard.part.states[0], count * grad)
            assert torch.equal(shard.part.replica, shard.part.master.bfloat16())
    return ranks.num_received, sum(buffer.numel() for buffer in update.buffers)


@settings(max_examples=25)
@given(st.data(), st.integers(1, 4), st.integers(1, 7))
def test_any_tiling_gives_the_update_of_whole_matrices(data: st.DataObject, world: int, block: int) -> None:
    chosen = data.draw(weights(world))
    lr_factor = data.draw(st.sampled_from([1.0, 2.0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix, "_BLOCK", block)
        results = on_threads(world, lambda comm: run(comm, chosen, lr_factor))
    for result in results:
        assert isinstance(result, tuple), result
    if all(weight.held is not None for weight in chosen):
        # what its owner does not hold, there and back: at most 4 bytes a parameter in BF16
        assert sum(received for received, _ in results) == 2 * sum(elements_sent(chosen, world))


def elements_sent(chosen: list[Weight], world: int) -> Iterator[int]:
    matrices = {weight.name: matrices_of(weight.name, weight.shape, weight.sizes) for weight in chosen}
    owners = assign_owners([one for found in matrices.values() for one in found], cost, world)
    for weight in chosen:
        for rank in range(world):
            held = {element for low, high in weight.intervals(rank) for element in range(low, high)}
            for one in matrices[weight.name]:
                if owners[one] != rank:
                    yield len(held & set(range(one.start, one.start + one.numel)))


def test_a_single_rank_sends_nothing_and_holds_its_matrices_once() -> None:
    weight = Weight("w", (4, 6), (4,), [5], [0, 0])
    assert on_threads(1, lambda comm: run(comm, [weight], 1.0)) == [(0, 24)]
