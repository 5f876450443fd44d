"""The update of matrices whose masters and states are sharded, by a rule that needs whole matrices.

Once a step each matrix goes to one owner, in the rule's ``matrix_dtype``, is transformed there, and returns. All else
is element by element, on the shards. A matrix that every rank holds is not sent to its owner; only the result is sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from dtrain.distributed.communicator import Communicator
from dtrain.optim.flat import COPIED, batches, store, update_group
from dtrain.optim.owners import Matrix, MatrixInterval, MatrixPlan, assign_owners, cut_at_matrices, matrices_of
from dtrain.optim.rule import MatrixRule, Rule, UpdateScalars, UpdateSlice
from dtrain.precision.fake import block_starts

_BLOCK = 1 << 16
"""Elements of one call of the rule on a CPU: few enough that its temporaries stay in the cache."""

HeldMatrix: TypeAlias = tuple[str, Sequence[int], int, int]
"""Name and shape of a matrix parameter, and the first and the last element plus one that a rank holds."""


@dataclass(frozen=True)
class MatrixShard:
    """The row-major elements of one matrix parameter on this rank, from ``start`` on.

    Attributes:
        name: of the parameter.
        shape: of the whole parameter, [rows, columns].
        start: the first element.
        part: the elements.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    part: UpdateSlice


@dataclass(frozen=True)
class _Block:
    """Elements of one matrix that are updated in one call.

    Attributes:
        name: of the parameter.
        part: the elements.
        move: where they lie on their way to the owner, and the result on its way back.
        shape: of the matrix.
        shard: number of the shard that they are in.
        offset: of the first one in the shard.
    """

    name: str
    part: UpdateSlice
    move: Tensor
    shape: tuple[int, int]
    shard: int
    offset: int


class MatrixUpdate:
    """Applies a rule to the shards of matrices; all ranks construct it, and call ``begin``.

    Each buffer serves both directions: the shards that this rank sends, the matrices that it owns, and, if ranks hold
    whole matrices, those of all owners.

    Args:
        rule: the optimizer.
        segments: shards of the matrices in each segment of this rank; a rank may have none.
        comm: the ranks that hold the matrices.
        held: what each rank holds, the same on all; None if they know only their own, and tell each other.

    Attributes:
        buffers: the memory in which matrices travel.
    """

    def __init__(
        self,
        rule: MatrixRule,
        segments: Sequence[Sequence[MatrixShard]],
        comm: Communicator,
        held: Sequence[Sequence[HeldMatrix]] | None = None,
    ) -> None:
        self._rule = rule
        self._comm = comm
        shards = list(chain.from_iterable(segments))
        self._plan = plan = _plan(rule, comm, _exchange(shards, comm) if held is None else held)
        dtype = rule.matrix_dtype
        # of equal sizes on all ranks, as a transport needs them
        self._sent = comm.allocate(plan.max_sent, dtype)
        self._owned = comm.allocate(plan.max_owned, dtype)
        self._sections = comm.allocate(plan.section * comm.world_size, dtype)
        self.buffers = [self._sent, self._owned, self._sections]
        places = self._places()
        numbers = iter(range(len(shards)))
        self._segments = [
            [block for shard in segment for block in _blocks(rule, shard, next(numbers), places)]
            for segment in segments
        ]
        self._matrices = [(matrix, [places[interval] for interval in parts]) for matrix, parts in plan.owned()]
        self._matrices += [(m, [places[MatrixInterval(m, 0, m.numel)]]) for m in plan.replicated[comm.rank]]

    def _places(self) -> dict[MatrixInterval, Tensor]:
        """Returns the memory of each interval that this rank holds or owns."""
        plan = self._plan
        places = _laid_out(self._sent, chain(*plan.sent))
        places |= _laid_out(self._owned, [*chain(*plan.received), *plan.kept])
        for owner, matrices in enumerate(plan.replicated):
            if not matrices:
                continue
            section = self._sections[owner * plan.section :]
            places |= _laid_out(section, [MatrixInterval(matrix, 0, matrix.numel) for matrix in matrices])
        return places

    @torch.no_grad()
    def begin(self, scalars: UpdateScalars, main_grads: Sequence[Tensor] | None = None) -> None:
        """Updates the states and transforms all matrices; all ranks call, after the vote.

        Args:
            scalars: scalars of this update.
            main_grads: of the shards in the order of the segments, if they lie elsewhere than at construction; may be
                overwritten.
        """
        for batch, shared in _batches(list(chain.from_iterable(self._segments)), scalars):
            grads = [block.part.main_grad.float() for block in batch]
            if main_grads is not None:
                grads = [main_grads[b.shard].narrow(0, b.offset, b.part.master.numel()) for b in batch]
            group = update_group([block.part for block in batch])
            self._rule.begin(group, grads, [block.move for block in batch], shared)
        plan, comm, rank = self._plan, self._comm, self._comm.rank
        # An element's buffer is overwritten on the way back. It has been read by then, because its owner starts the
        # second collective after it has waited for the first; before the next update all ranks vote.
        self._exchange(self._owned, self._sent, plan.received, plan.sent, "matrices to their owners")
        for matrix, parts in self._matrices:
            # a copy, even of a single part: products might depend on the alignment of their operands
            moves = self._rule.transform(torch.cat(parts).view(matrix.shape)).reshape(-1)
            for part, moved in zip(parts, moves.split([part.numel() for part in parts]), strict=True):
                part.copy_(moved)
        self._exchange(self._sent, self._owned, plan.sent, plan.received, "matrices from their owners")
        if plan.section:
            own = self._sections[rank * plan.section : (rank + 1) * plan.section]
            comm.all_gather(self._sections, own, label="matrices of all owners").wait()

    def _exchange(
        self,
        output: Tensor,
        source: Tensor,
        received: Sequence[Sequence[MatrixInterval]],
        sent: Sequence[Sequence[MatrixInterval]],
        label: str,
    ) -> None:
        if self._plan.total:
            sizes, source_sizes = ([sum(i.numel for i in intervals) for intervals in side] for side in (received, sent))
            output, source = output[: sum(sizes)], source[: sum(source_sizes)]
            total = self._plan.total
            self._comm.all_to_all(output, source, sizes, source_sizes, total=total, label=label).wait()

    @torch.no_grad()
    def update(self, numbers: Sequence[int], scalars: UpdateScalars) -> None:
        """Updates the masters of some segments, and casts them into their replicas; after ``begin``.

        Args:
            numbers: ascending indices into ``segments``.
            scalars: those of ``begin``.
        """
        for batch, shared in _batches([block for number in numbers for block in self._segments[number]], scalars):
            parts = [block.part for block in batch]
            scaled = shared.scaled(parts[0].update_class.lr_factor)
            moves, shapes = [block.move for block in batch], [block.shape for block in batch]
            group = update_group(parts)
            self._rule.finish(group, moves, shapes, scaled)
            store(parts, group)


def storages(updates: Mapping[int, MatrixUpdate]) -> dict[str, list[Tensor]]:
    """Returns the buffers of ``updates`` as ``matrices``, a kind of ``Engine.memory``; nothing without updates."""
    return {"matrices": [tensor for update in updates.values() for tensor in update.buffers]} if updates else {}


def matrix_updates(
    rules: Sequence[Rule],
    segments: Sequence[Sequence[MatrixShard]],
    comm: Communicator,
    held_by: Callable[[int], Sequence[Sequence[HeldMatrix]]] | None = None,
) -> dict[int, MatrixUpdate]:
    """Returns the update of each rule among ``rules`` that needs whole matrices, by its number; all ranks call.

    Args:
        rules: the rules, by number.
        segments: the shards of all matrices in each segment of this rank.
        comm: the ranks that hold them.
        held_by: returns what each rank holds for a rule, by its number; None: the ranks tell each other.
    """
    found = {}
    for number, rule in enumerate(rules):
        if isinstance(rule, MatrixRule):
            own = [[shard for shard in segment if shard.part.update_class.rule == number] for segment in segments]
            found[number] = MatrixUpdate(rule, own, comm, None if held_by is None else held_by(number))
    return found


def _exchange(shards: Sequence[MatrixShard], comm: Communicator) -> list[list[HeldMatrix]]:
    own = [[s.name, list(s.shape), s.start, s.start + s.part.master.numel()] for s in shards]
    return [json.loads(text) for text in comm.exchange_text(json.dumps(own))]


def _plan(rule: MatrixRule, comm: Communicator, held_by_rank: Sequence[Sequence[HeldMatrix]]) -> MatrixPlan:
    held = []
    known: dict[str, list[Matrix]] = {}  # most ranks hold a part of the same few parameters
    for of_rank in held_by_rank:
        intervals = []
        for name, shape, start, stop in of_rank:
            matrices = known.get(name) or known.setdefault(name, matrices_of(name, shape, rule.splits.get(name)))
            intervals += [interval for interval, _ in cut_at_matrices(matrices, start, stop)]
        held.append(intervals)
    found = {interval.matrix for intervals in held for interval in intervals}
    return MatrixPlan(held, assign_owners(found, rule.cost, comm.world_size), comm.rank)


def _laid_out(buffer: Tensor, intervals: Iterable[MatrixInterval]) -> dict[MatrixInterval, Tensor]:
    """Returns the memory of ``intervals``, one after the other in ``buffer``."""
    places, start = {}, 0
    for interval in intervals:
        places[interval] = buffer[start : start + interval.numel]
        start += interval.numel
    return places


def _blocks(
    rule: MatrixRule, shard: MatrixShard, number: int, places: dict[MatrixInterval, Tensor]
) -> Iterator[_Block]:
    part = shard.part
    numel = part.master.numel()
    # uncut on a GPU, where blocks do not help, except to bound the memory of copies
    size = COPIED if part.needs_copy else max(numel, 1)
    size = _BLOCK if part.master.device.type == "cpu" else size
    matrices = matrices_of(shard.name, shard.shape, rule.splits.get(shard.name))
    for interval, offset in cut_at_matrices(matrices, shard.start, shard.start + numel):
        move = places[interval]
        for start in block_starts(move, size):
            stop = min(start + size, interval.numel)
            block = part.part(offset + start, offset + stop)
            yield _Block(shard.name, block, move[start:stop], interval.matrix.shape, number, offset + start)


def _batches(blocks: Sequence[_Block], scalars: UpdateScalars) -> Iterator[tuple[list[_Block], UpdateScalars]]:
    """Yields the blocks of each call of the rule, with their scalars."""
    for own, found in scalars.split(blocks, lambda block: block.name):
        yield from ((batch, own) for batch in batches(found, lambda block: block.part))
