"""The model states of one rank - replicas, main grads, masters, moments - placed by a row of the stage table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from dtrain.distributed.collectives import Communicator
from dtrain.errors import UsageError
from dtrain.precision.policy import Contract, is_fp32_class
from dtrain.sharding.accumulate import RunningSum, TreeSum
from dtrain.sharding.buffer import BufferPool, ReplicaBuffer, UpdateSlice
from dtrain.sharding.layout import CHUNK, ArenaLayout, FlatLayout, Interval, ParamSpec, Segment, flat_layouts
from dtrain.sharding.param_group import ParamGroup, find_groups, move_to_root
from dtrain.sharding.placement import Placement, Placements
from dtrain.sharding.reduction import FlatGradient, GradientReducer, ShardedGradient, UnshardedGradient


class ShardedState:
    """Takes a model's trainable parameters over: FP32 into the arena, replicas into flat buffers.

    Args:
        model: on its device; its parameters become views of the replicas.
        contract: the replica dtype of every parameter.
        placements: a row of the stage table.
        comm: the ranks that share.
        groups: see :func:`dtrain.sharding.param_group.find_groups`.
        reproducible: sum leaves along the canonical tree.
        all_reduce: with replicated gradients and sharded masters (stage 1), all-reduce instead of reduce-scatter.
    """

    def __init__(
        self,
        model: nn.Module,
        contract: Contract,
        placements: Placements,
        comm: Communicator,
        *,
        groups: str | Sequence[str] = "auto",
        reproducible: bool = False,
        all_reduce: bool = False,
    ) -> None:
        self._comm = comm
        self._placements = placements
        self._contract = contract
        self._all_reduce = all_reduce
        self._device = comm.device
        self.reproducible = reproducible
        self.groups = self._with_islands_in_root(find_groups(model, groups))
        self._norms = {id(p) for m in model.modules() if is_fp32_class(m) for p in m.parameters(recurse=False)}
        parameters = dict(model.named_parameters())
        layouts = [self._layouts_of(group) for group in self.groups]
        self.layouts = [layout for group in layouts for layout in group]
        self.arena = ArenaLayout.of(self.layouts, comm.rank, sharded=placements.master is Placement.SHARD)
        # masters first: they take the parameters' true values, not what the replicas round them to
        self.master = self._zeros(self.arena.numel)
        for segment in self.arena.segments:
            for part in segment.intervals():
                source = parameters[part.spec.name].detach().reshape(-1)[part.start : part.stop]
                start = segment.arena_start + part.offset
                self.master[start : start + part.stop - part.start].copy_(source)
        self.exp_avg = self._zeros(self.arena.numel)
        self.exp_avg_sq = self._zeros(self.arena.numel)
        self.replicas = [ReplicaBuffer(layout, parameters, self._device) for layout in self.layouts]
        self._grad_storages: list[Tensor] = []
        self._pool = BufferPool(self._device)
        self.main_grads, flats = self._gradients()
        self.reducer = self._reducer(layouts, flats)
        self._install_hooks(layouts, parameters, flats)
        self.weight = torch.ones((), dtype=torch.float32, device=self._device)
        self.in_backward = False

    # -- construction ----------------------------------------------------------------------------------------------

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=torch.float32, device=self._device)

    def _with_islands_in_root(self, groups: tuple[ParamGroup, ...]) -> tuple[ParamGroup, ...]:
        """Where a unit has low and FP32 parameters, the FP32 ones (norms) join the root's.

        They are few and small: a flat buffer of their own in every unit would be mostly padding, and would double the
        number of collectives.
        """
        if not self._contract.policy.is_low:
            return groups
        dtypes = self._contract.replica_dtypes
        islands = {
            name
            for group in groups
            if any(dtypes[name] != torch.float32 for name, _ in group.parameters)
            for name, _ in group.parameters
            if dtypes[name] == torch.float32
        }
        return move_to_root(groups, islands)

    def _layouts_of(self, group: ParamGroup) -> tuple[FlatLayout, ...]:
        specs = [
            ParamSpec(name, tuple(p.shape), self._contract.replica_dtypes[name], self._is_decayed(p))
            for name, p in group.parameters
        ]
        return flat_layouts(group.name, specs, self._comm.world_size)

    def _is_decayed(self, parameter: nn.Parameter) -> bool:
        return parameter.dim() > 1 and id(parameter) not in self._norms

    def _gradients(self) -> tuple[list[Tensor], list[FlatGradient]]:
        """The main grad of each segment and the gradient object of each flat buffer."""
        alone = self._comm.world_size == 1
        holds_all = self._placements.master is Placement.REPLICATE or alone
        # with one rank nothing travels, so gradients can accumulate where they belong
        exchange_leaves = self.reproducible or (self._placements.gradient is Placement.SHARD and not alone)
        main_grads: list[Tensor] = []
        flats: list[FlatGradient] = []
        arena = self._zeros(self.arena.numel) if exchange_leaves or holds_all else None
        if arena is not None:
            self._grad_storages.append(arena)
        for segment in self.arena.segments:
            layout = segment.layout
            if arena is not None:
                main_grad = arena[segment.arena_start : segment.arena_stop]
            else:
                full = self._zeros(layout.numel)
                self._grad_storages.append(full)
                main_grad = full[segment.flat_start : segment.flat_start + segment.numel]
            main_grads.append(main_grad)
            if exchange_leaves:
                flats.append(self._sharded_gradient(layout, main_grad))
            elif arena is not None:
                flats.append(UnshardedGradient(layout, self._comm, main_grad, None))
            else:
                flats.append(UnshardedGradient(layout, self._comm, full, None if self._all_reduce else main_grad))
        return main_grads, flats

    def _sharded_gradient(self, layout: FlatLayout, main_grad: Tensor) -> ShardedGradient:
        low = layout.dtype != torch.float32
        wire_dtype = self._contract.policy.reduce_dtype if low else torch.float32
        start, stop = layout.shard(self._comm.rank)
        own = main_grad if main_grad.numel() == layout.shard_numel else main_grad[start:stop]
        leaf_sum = TreeSum() if self.reproducible else RunningSum(own)
        return ShardedGradient(layout, self._comm, self._pool, leaf_sum, wire_dtype, main_grad)

    def _reducer(self, layouts: list[tuple[FlatLayout, ...]], flats: list[FlatGradient]) -> GradientReducer:
        """Groups in the order in which backward completes them: the last first, the root (embeddings) at the end."""
        remaining = iter(flats)
        by_group = [[next(remaining) for _ in group] for group in layouts]
        counts = [len(group.parameters) for group in self.groups]
        order = sorted(range(len(self.groups)), key=lambda i: (self.groups[i].name == "", -i))
        self._position = {group: position for position, group in enumerate(order)}
        return GradientReducer([by_group[i] for i in order], [counts[i] for i in order], self._comm)

    def _install_hooks(
        self,
        layouts: list[tuple[FlatLayout, ...]],
        parameters: dict[str, nn.Parameter],
        flats: list[FlatGradient],
    ) -> None:
        remaining = iter(flats)
        for group_index, group_layouts in enumerate(layouts):
            number = 0
            for layout in group_layouts:
                flat = next(remaining)
                for slot, place in enumerate(layout.slots):
                    self._install_hook(parameters[place.spec.name], place.spec.name, flat, slot, group_index, number)
                    number += 1

    def _install_hook(
        self, parameter: nn.Parameter, name: str, flat: FlatGradient, slot: int, group: int, number: int
    ) -> None:
        position = self._position[group]

        def on_gradient(_: Tensor) -> None:
            grad, parameter.grad = parameter.grad, None
            if not self.in_backward:
                raise UsageError(f"'{name}' got a gradient outside engine.backward; call engine.backward(loss) instead")
            if self.reducer.is_duplicate(position, number):
                raise UsageError(
                    f"'{name}' got a second gradient in one micro-batch; reentrant activation checkpointing does this, "
                    f"use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
            assert grad is not None
            flat.receive(slot, grad, self.weight)
            self.reducer.complete(position, number)

        parameter.register_post_accumulate_grad_hook(on_gradient)

    # -- the update ------------------------------------------------------------------------------------------------

    def update_slices(self) -> list[list[UpdateSlice]]:
        """The arena, segment by segment, each cut where the weight-decay class changes."""
        return [
            [
                self._update_slice(segment, main_grad, decayed, low, high)
                for decayed, low, high in segment.class_ranges()
            ]
            for segment, main_grad in zip(self.arena.segments, self.main_grads, strict=True)
        ]

    def _update_slice(self, segment: Segment, main_grad: Tensor, decayed: bool, low: int, high: int) -> UpdateSlice:
        start, stop = segment.arena_start + low, segment.arena_start + high
        moments = self.exp_avg[start:stop], self.exp_avg_sq[start:stop]
        return UpdateSlice(decayed, self.master[start:stop], main_grad[low:high], *moments)

    def refresh_replicas(self, before_each: Callable[[int], None] = lambda number: None) -> None:
        """Casts the masters into the compute replicas and gathers what other ranks own, in forward order.

        Args:
            before_each: called with the number of each segment before it is cast, to update its master: so the first
                groups travel while the others are still updated.
        """
        gather = self._placements.master is Placement.SHARD
        pending = []
        for number, (segment, replica) in enumerate(zip(self.arena.segments, self.replicas, strict=True)):
            before_each(number)
            replica.write(segment, self.master[segment.arena_start : segment.arena_stop])
            if gather:
                own = replica.flat[segment.flat_start : segment.flat_start + segment.numel]
                pending.append(self._comm.all_gather(replica.flat, own, label=segment.layout.name))
        for work in pending:
            work.wait()

    # -- the norm --------------------------------------------------------------------------------------------------

    def _own_main_grads(self) -> Iterator[tuple[FlatLayout, Tensor]]:
        """This rank's shard of every main grad, at every stage: replicated elements are counted once."""
        for segment, main_grad in zip(self.arena.segments, self.main_grads, strict=True):
            start, stop = segment.layout.shard(self._comm.rank)
            yield segment.layout, main_grad[start - segment.flat_start : stop - segment.flat_start]

    def chunk_squares(self) -> Tensor:
        """FP64 [chunks of this rank]: sums of squares of the main grads' chunks; not finite where a chunk is not.

        The FP32 norm of 1,024 elements is precise enough and twenty times faster; where it overflows, FP64 decides.
        """
        chunks = [grad.view(-1, CHUNK) for _, grad in self._own_main_grads()]
        squares = torch.cat([torch.linalg.vector_norm(part, dim=1).double() for part in chunks]).square_()
        if squares.isfinite().all():
            return squares
        exact = torch.cat([part.double().square().sum(dim=1) for part in chunks])
        return torch.where(squares.isfinite(), squares, exact)

    def canonical_sum(self, chunk_squares: Tensor) -> float:
        """The global sum of squares, added in chunk order whatever the world size."""
        rows = self._comm.gather_rows(chunk_squares, label="chunk squares")
        parts, column = [], 0
        for layout in self.layouts:
            width = layout.shard_numel // CHUNK
            parts.append(rows[:, column : column + width].reshape(-1)[: layout.real_numel // CHUNK])
            column += width
        return float(torch.cat(parts).sum())

    def first_bad_parameter(self) -> int:
        """Index (see :attr:`parameter_names`) of the first parameter with a non-finite element in this rank's shard."""
        index = 0
        for layout, grad in self._own_main_grads():
            start, stop = layout.shard(self._comm.rank)
            for part in layout.intervals(start, stop):
                if not grad[part.offset : part.offset + part.stop - part.start].isfinite().all():
                    return index + [slot.spec.name for slot in layout.slots].index(part.spec.name)
            index += len(layout.slots)
        return -1

    @property
    def parameter_names(self) -> list[str]:
        """All trainable parameters in the order of the layouts."""
        return [slot.spec.name for layout in self.layouts for slot in layout.slots]

    # -- logical access --------------------------------------------------------------------------------------------

    def owned_intervals(self) -> Iterator[tuple[Interval, int]]:
        """(interval, its place in the arena) of what this rank saves: its shard, at every stage."""
        for segment in self.arena.segments:
            start, stop = segment.layout.shard(self._comm.rank)
            for part in segment.layout.intervals(start, stop):
                yield part, segment.arena_start + start - segment.flat_start + part.offset

    def held_intervals(self) -> Iterator[tuple[Interval, int]]:
        """(interval, its place in the arena) of all that this rank holds and must load."""
        for segment in self.arena.segments:
            for part in segment.intervals():
                yield part, segment.arena_start + part.offset

    def gather_full(self, arena: Tensor) -> Iterator[tuple[ParamSpec, Tensor]]:
        """Every parameter of ``arena`` (master or a moment) in full, FP32, buffer by buffer; all ranks call."""
        for segment in self.arena.segments:
            yield from self._full_segment(segment, arena[segment.arena_start : segment.arena_stop])

    def gather_full_main_grads(self) -> Iterator[tuple[ParamSpec, Tensor]]:
        """Every main grad in full, still scaled and weighted; all ranks call."""
        for segment, main_grad in zip(self.arena.segments, self.main_grads, strict=True):
            yield from self._full_segment(segment, main_grad)

    def _full_segment(self, segment: Segment, part: Tensor) -> Iterator[tuple[ParamSpec, Tensor]]:
        layout = segment.layout
        full = part
        if segment.numel != layout.numel:
            full = self._zeros(layout.numel)
            self._comm.all_gather(full, part.contiguous(), label=f"full {layout.name}").wait()
        for slot in layout.slots:
            yield slot.spec, full[slot.start : slot.stop].view(slot.spec.shape)

    # -- memory ----------------------------------------------------------------------------------------------------

    def storages(self) -> dict[str, list[Tensor]]:
        """The tensors that hold this rank's model states, by kind, and the leaf buffers that now lie idle."""
        return {
            "compute": [replica.flat for replica in self.replicas],
            "main_grad": self._grad_storages,
            "master": [self.master],
            "moments": [self.exp_avg, self.exp_avg_sq],
            "leaf_buffers": self._pool.idle(),
        }
