"""Matrices over ranks: which rank owns which, and where their elements lie; arithmetic only, no tensors.

A matrix is a parameter, or a part of a fused one along its first dim. For a part of an update it has one *owner*, the
only rank that computes on all of it. The owners are a function of the matrices and the number of ranks alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, pairwise


@dataclass(frozen=True, order=True)
class Matrix:
    """Rows ``first_row`` to ``first_row + shape[0]`` of parameter ``name``."""

    name: str
    first_row: int
    shape: tuple[int, int]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape[0] * self.shape[1]

    @property
    def start(self) -> int:
        """First element, in the parameter."""
        return self.first_row * self.shape[1]


@dataclass(frozen=True, order=True)
class MatrixInterval:
    """Row-major elements ``start`` to ``stop`` of a matrix."""

    matrix: Matrix
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def matrices_of(name: str, shape: Sequence[int], sizes: Sequence[int] | None = None) -> list[Matrix]:
    """Returns the matrices that parameter ``name`` [rows, columns] holds; ``sizes`` are their rows, by default all."""
    rows, columns = shape
    sizes = (rows,) if sizes is None else sizes
    if sum(sizes) != rows:
        raise ValueError(f"'{name}' has {rows} rows, and is split into {list(sizes)}")
    return [Matrix(name, sum(sizes[:n]), (size, columns)) for n, size in enumerate(sizes)]


def cut_at_matrices(matrices: Sequence[Matrix], start: int, stop: int) -> Iterator[tuple[MatrixInterval, int]]:
    """Yields what lies in elements ``start`` to ``stop`` of a parameter: interval, and offset from ``start``."""
    for matrix in matrices:
        low, high = max(start, matrix.start), min(stop, matrix.start + matrix.numel)
        if low < high:
            yield MatrixInterval(matrix, low - matrix.start, high - matrix.start), low - start


def assign_owners(
    matrices: Collection[Matrix], cost: Callable[[tuple[int, int]], float], world_size: int
) -> dict[Matrix, int]:
    """Returns the owner of each matrix: the most expensive one first, to the rank with the least so far.

    This is LPT scheduling (Graham, 1969): the busiest rank has at most 4/3 of what it has at the optimum.
    """
    loads = [(0.0, rank) for rank in range(world_size)]
    owners = {}
    for matrix in sorted(matrices, key=lambda m: (-cost(m.shape), m)):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + cost(matrix.shape), rank))
        owners[matrix] = rank
    return owners


@dataclass
class MatrixPlan:
    """Plan of one rank: which intervals it sends to the owners of matrices, receives as an owner, and returns.

    A matrix is either tiled by the intervals of the ranks, or every rank holds all of it. An interval that its matrix's
    owner holds is not sent.

    Args:
        held: intervals on each rank.
        owners: rank by matrix.
        rank: this rank.

    Raises:
        ValueError: the intervals of a matrix neither tile it nor are all of it on every rank.

    Attributes:
        sent: tiled intervals of this rank by owner, none for itself.
        received: tiled intervals that this rank owns by the rank that holds them, none of its own.
        kept: tiled intervals that it holds and owns.
        replicated: matrices that every rank holds, by owner.
        total: elements of tiled matrices that all ranks send to owners.
        max_sent, max_owned: largest number of elements that a rank sends, and owns, of tiled matrices.
        section: largest number of elements that a rank owns of replicated matrices.
    """

    held: Sequence[Sequence[MatrixInterval]]
    owners: Mapping[Matrix, int]
    rank: int
    sent: list[list[MatrixInterval]] = field(init=False)
    received: list[list[MatrixInterval]] = field(init=False)
    kept: list[MatrixInterval] = field(init=False)
    replicated: list[list[Matrix]] = field(init=False)

    def __post_init__(self) -> None:
        ranks = range(len(self.held))
        whole = self._find_replicated()
        self.sent, self.received, self.kept = [[] for _ in ranks], [[] for _ in ranks], []
        sent, owned = [0 for _ in ranks], [0 for _ in ranks]
        # one pass over all intervals: lists for each pair of ranks would grow with the square of their number
        for holder, interval in ((rank, interval) for rank, own in enumerate(self.held) for interval in own):
            if interval.matrix in whole:
                continue
            owner = self.owners[interval.matrix]
            owned[owner] += interval.numel
            if owner != holder:
                sent[holder] += interval.numel
            if holder == owner == self.rank:
                self.kept.append(interval)
            elif holder == self.rank:
                self.sent[owner].append(interval)
            elif owner == self.rank:
                self.received[holder].append(interval)
        self.replicated = [[] for _ in ranks]
        for matrix in sorted(whole):
            self.replicated[self.owners[matrix]].append(matrix)
        self.max_sent, self.total, self.max_owned = max(sent), sum(sent), max(owned)
        self.section = max(sum(matrix.numel for matrix in matrices) for matrices in self.replicated)

    def _find_replicated(self) -> set[Matrix]:
        on_each = [set(intervals) for intervals in self.held]
        whole = {m for m in self.owners if all(MatrixInterval(m, 0, m.numel) in held for held in on_each)}
        if len(self.held) == 1:
            whole = set()  # a single rank's is tiled by one interval
        by_matrix: dict[Matrix, list[MatrixInterval]] = {matrix: [] for matrix in self.owners if matrix not in whole}
        for interval in chain.from_iterable(self.held):
            if interval.matrix not in whole:
                by_matrix[interval.matrix].append(interval)
        for matrix, intervals in by_matrix.items():
            bounds = [(0, 0), *sorted((i.start, i.stop) for i in intervals), (matrix.numel, matrix.numel)]
            if any(stop != start for (_, stop), (start, _) in pairwise(bounds)):
                raise ValueError(f"the ranks hold {bounds[1:-1]} of {matrix}; expected a tiling, or all of it on each")
        return whole

    def owned(self) -> list[tuple[Matrix, list[MatrixInterval]]]:
        """Returns the tiled matrices that this rank owns, with their intervals in order."""
        intervals = sorted(chain(self.kept, *self.received))
        return [(matrix, list(own)) for matrix, own in groupby(intervals, key=lambda interval: interval.matrix)]
