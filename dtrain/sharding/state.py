"""The model states of one rank (replicas, main grads, masters, moments), placed by a row of the stage table.

[Note: construction order] :class:`ShardedState` is built in this order, the same on all ranks:

1. Layouts and arena: arithmetic only.
2. Masters, copied from the parameters, because binding a replica takes a parameter's unrounded values away.
3. Replicas, then the FP8 scales, which cast into them, then the unshard scheduler, which holds the sharded ones.
4. Buffers of unreduced gradients, main grads and the reducer.
5. Gradient hooks, which use all of these.
6. The first refresh, which fills the replicas.

``Communicator.allocate`` is a collective, so its calls in steps 2 to 4 come in one order on all ranks.

[Note: FP32 replicas] An FP32 replica has the numbers of its master. If a rank holds the same elements of both
(:meth:`Placements.shares_fp32_storage`), the replica's local slice is the master's segment of the arena: the update
writes it once, casts nothing, and there is nothing to refresh. At stage 3 the other ranks gather it from the arena,
which therefore comes from ``Communicator.allocate``. [Note: buffer reuse] holds as it does for other replicas: a master
is written by an update, after the vote, or by a load, after the ranks have agreed on a checkpoint. Segments start on
chunks, so parameters have the alignment that they have in a buffer of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor, nn

from dtrain.distributed.communicator import Communicator, Pending
from dtrain.errors import UsageError
from dtrain.optim.adamw import UpdateSlice
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.parameters.groups import (
    ParamGroup,
    backward_order,
    decayed_names,
    find_groups,
    matching_parameters,
    move_to_root,
)
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.precision.contract import Contract
from dtrain.precision.float8.cast import E4M3
from dtrain.sharding.accumulate import RunningSum, TreeSum
from dtrain.sharding.execution_order import ShardedGroup
from dtrain.sharding.float8_casts import ScaleTable
from dtrain.sharding.float8_scales import CastRange, CurrentScales, DelayedScales
from dtrain.sharding.layout import CHUNK, ArenaLayout, ArenaSegment, FlatLayout, ParamSpec, ShardInterval, flat_layouts
from dtrain.sharding.micro_batch_gradients import MicroBatchGradient, MicroBatchGradientBuffers, MicroBatchGradientSpec
from dtrain.sharding.placement import Placement, Placements
from dtrain.sharding.quantized_replicas import Float8Views, TransposeSet
from dtrain.sharding.reduce import FlatGradient, GradientReducer, ShardedGradient, UnshardedGradient
from dtrain.sharding.replicas import ParameterViews, ReplicaBuffer, ShardedReplica
from dtrain.sharding.unshard import UnshardOptions, UnshardScheduler

_GATHER_BUCKETS = 4
"""Calls of the update on a GPU if replicas are gathered after it: the gathers of one overlap with the next update."""


@dataclass(frozen=True)
class _GradientDestination:
    """Indices of a parameter's gradient: flat buffer, slot, group, and number in that group."""

    name: str
    flat: int
    slot: int
    group: int
    number: int


class ShardedState:
    """Moves a model's trainable parameters into the arena (FP32) and into flat buffers (replicas).

    All ranks build it together; the order is in [Note: construction order].

    Args:
        model: on its device; its parameters become views of the replicas.
        contract: the replica dtype of every parameter.
        placements: a row of the stage table.
        comm: the ranks that share the states.
        groups: see :func:`dtrain.parameters.groups.find_groups`.
        reproducible: sum micro-batch gradients along the canonical tree.
        all_reduce: with replicated gradients and sharded masters (stage 1), all-reduce instead of reduce-scatter.
        unshard: with sharded compute replicas (stage 3), when groups are unsharded and resharded.
        peak_lr: about the largest change of a weight in one update; for delayed scales.

    Attributes:
        scales: scales of the FP8 replicas.
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
        unshard: UnshardOptions,
        peak_lr: float,
    ) -> None:
        self._comm = comm
        self._placements = placements
        self._contract = contract
        self._all_reduce = all_reduce
        self._device = comm.device
        self.reproducible = reproducible
        found = self._move_fp32_to_root(find_groups(model, groups))
        self.groups = move_to_root(found, matching_parameters(model, unshard.keep_gathered))
        self._decayed = decayed_names(model)
        parameters = dict(model.named_parameters())
        self.layouts = [layout for group in self.groups for layout in self._layouts_of(group)]
        self.arena = ArenaLayout.of(self.layouts, comm.rank, sharded=placements.master is Placement.SHARD)
        # a single rank's shard is the whole buffer, so nothing is left to gather
        shards_compute = placements.compute is Placement.SHARD and comm.world_size > 1
        # [Note: construction order] from here on
        self.master = self._copy_masters(parameters, others_read=shards_compute)
        self.exp_avg = self._zeros(self.arena.numel)
        self.exp_avg_sq = self._zeros(self.arena.numel)
        self._scale_table = ScaleTable(self.layouts, contract.policy.float8.recipe == "rowwise", self._device)
        replica_type = ShardedReplica if shards_compute else ReplicaBuffer
        self._transposes = None if shards_compute else TransposeSet()
        self.replicas = [
            replica_type(segment, self._views(segment.layout, parameters), comm, self._shared_master(segment))
            for segment in self.arena.segments
        ]
        self.scales = self._float8_scales(peak_lr)
        self.unshard_scheduler = (
            UnshardScheduler(model, self._sharded_groups(), unshard, comm) if shards_compute else None
        )
        self._grad_storages: list[Tensor] = []
        self.monitor = GradientMonitor(sum(len(layout.slots) for layout in self.layouts))
        # {index of a group: position in which backward completes it}, sorted by position
        self._backward_position = {group: position for position, group in enumerate(backward_order(self.groups))}
        self.main_grads, self._flat_gradients = self._build_gradients()
        self.reducer = self._build_reducer()
        self._install_hooks(parameters)
        self.weight = Weight(torch.ones((), dtype=torch.float32, device=self._device), is_one=True)
        self.in_backward = False
        self.refresh_replicas()

    # -- construction ----------------------------------------------------------------------------------------------

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=torch.float32, device=self._device)

    def _move_fp32_to_root(self, groups: tuple[ParamGroup, ...]) -> tuple[ParamGroup, ...]:
        """Moves the FP32 parameters (norms) of mixed groups to the root group; of FP8 groups, the biases too.

        They are few and small: a flat buffer of their own in every group would be mostly padding, and would double the
        number of collectives.
        """
        dtypes = self._contract.replica_dtypes
        moved: set[str] = set()
        for group in groups:
            narrowest = min((dtypes[name] for name, _ in group.parameters), key=lambda dtype: dtype.itemsize)
            moved |= {
                name
                for name, p in group.parameters
                if dtypes[name] != narrowest and (dtypes[name] == torch.float32 or (narrowest == E4M3 and p.dim() < 2))
            }
        return move_to_root(groups, moved)

    def _layouts_of(self, group: ParamGroup) -> tuple[FlatLayout, ...]:
        specs = [
            ParamSpec(name, tuple(p.shape), self._contract.replica_dtypes[name], name in self._decayed)
            for name, p in group.parameters
        ]
        return flat_layouts(group.name, specs, self._comm.world_size)

    def _copy_masters(self, parameters: dict[str, nn.Parameter], *, others_read: bool) -> Tensor:
        """Returns the arena of masters, with the parameters' values."""
        if others_read and any(layout.dtype == torch.float32 for layout in self.layouts):  # [Note: FP32 replicas]
            master = self._comm.allocate(self.arena.numel, torch.float32)
        else:
            master = self._zeros(self.arena.numel)
        for segment in self.arena.segments:
            for interval in segment.intervals():
                source = parameters[interval.spec.name].detach().reshape(-1)[interval.start : interval.stop]
                start = segment.arena_start + interval.offset
                master[start : start + interval.stop - interval.start].copy_(source)
        return master

    def _shared_master(self, segment: ArenaSegment) -> Tensor | None:
        """Returns the masters of ``segment`` if they also serve as its replica: [Note: FP32 replicas]."""
        is_shared = self._placements.shares_fp32_storage(self._comm.world_size)
        if segment.layout.dtype != torch.float32 or not is_shared:
            return None
        return self.master[segment.arena_start : segment.arena_stop]

    def _views(self, layout: FlatLayout, parameters: dict[str, nn.Parameter]) -> ParameterViews:
        if layout.dtype != E4M3:
            return ParameterViews(layout, parameters)
        recipe = self._contract.recipe
        assert recipe is not None
        return Float8Views(layout, parameters, self._scale_table, recipe, self._transposes)

    def _float8_scales(self, peak_lr: float) -> CurrentScales:
        replicas = [replica.local for replica in self.replicas]
        # with replicated masters every rank sees whole weights, so there is nothing to reduce
        comm = self._comm if self._placements.master is Placement.SHARD else None
        recipe = self._contract.recipe
        compiled = recipe is not None and recipe.compile
        arguments = (self._scale_table, self.arena.segments, self.master, replicas, comm)
        if self._contract.policy.float8.weight_scale == "delayed":
            return DelayedScales(*arguments, peak_lr=peak_lr, compiled=compiled)
        return CurrentScales(*arguments, compiled=compiled)

    def grad_dtype(self, layout: FlatLayout) -> torch.dtype:
        """Dtype in which the gradients of a flat buffer's parameters leave backward."""
        return self._contract.parameter_dtype(layout.slots[0].spec.name)

    def attach(self, model: nn.Module) -> None:
        """Connects the model's Linears that compute in FP8 with their weights here."""
        for replica in self.replicas:
            if isinstance(replica.views, Float8Views):
                replica.views.attach(model)

    def _sharded_groups(self) -> list[ShardedGroup]:
        sharded = [replica for replica in self.replicas if isinstance(replica, ShardedReplica)]
        return [ShardedGroup(group, [r for r in sharded if r.layout.group == group.name]) for group in self.groups]

    def _build_gradients(self) -> tuple[list[Tensor], list[FlatGradient]]:
        """Returns the main grad of each segment and the gradient object of each flat buffer."""
        single_rank = self._comm.world_size == 1
        has_full_masters = self._placements.master is Placement.REPLICATE or single_rank
        every_micro_batch = self._placements.reduces_every_micro_batch(reproducible=self.reproducible)
        if single_rank and not self.reproducible:  # nothing is sent, so gradients accumulate in the main grads
            every_micro_batch = False
        buffers = self._micro_batch_gradients(every_micro_batch)
        main_grads: list[Tensor] = []
        flats: list[FlatGradient] = []
        arena: Tensor | None = None
        if has_full_masters:  # the other ranks read it, during the all-reduce or the all-gather of sums
            arena = self._comm.allocate(self.arena.numel, torch.float32)
        elif every_micro_batch:  # no other rank reads it
            arena = self._zeros(self.arena.numel)
        if arena is not None:
            self._grad_storages.append(arena)
        for segment in self.arena.segments:
            layout, buffer = segment.layout, buffers.get(segment.layout.name)
            full = None
            if arena is not None:
                main_grad = arena[segment.arena_start : segment.arena_stop]
            else:  # stage 1: gradients are unsharded, masters are not
                full = self._comm.allocate(layout.numel, torch.float32)
                self._grad_storages.append(full)
                main_grad = full[segment.flat_start : segment.flat_start + segment.numel]
            main_grads.append(main_grad)
            if every_micro_batch:
                assert buffer is not None
                start, stop = layout.shard(self._comm.rank)
                shard = main_grad[start - segment.flat_start : stop - segment.flat_start]
                gradient_sum = TreeSum() if self.reproducible else RunningSum(shard)
                flats.append(ShardedGradient(layout, self._comm, buffer, gradient_sum, shard, main_grad))
            elif full is None:
                flats.append(UnshardedGradient(layout, self._comm, main_grad, True, buffer))
            else:
                flats.append(UnshardedGradient(layout, self._comm, full, self._all_reduce, buffer))
        return main_grads, flats

    def _micro_batch_gradients(self, every_micro_batch: bool) -> dict[str, MicroBatchGradient]:
        """Returns them by flat buffer: all, or, if FP32 sums are reduced, those that are rounded before."""
        dtype_during_reduction = self._contract.policy.dtype_during_reduction
        specs = [
            MicroBatchGradientSpec(layout, dtype_during_reduction(self.grad_dtype(layout)))
            for layout in self.backward_order
        ]
        if not every_micro_batch:
            specs = [spec for spec in specs if self._comm.world_size > 1 and spec.dtype != torch.float32]
        # backward order: the root group comes last
        num_root = sum(spec.layout.group == specs[-1].layout.group for spec in specs)
        self._gradient_buffers = MicroBatchGradientBuffers(self._comm, specs, num_root)
        return {spec.layout.name: buffer for spec, buffer in zip(specs, self._gradient_buffers.buffers, strict=True)}

    def _build_reducer(self) -> GradientReducer:
        flats = list(zip(self.layouts, self._flat_gradients, strict=True))
        groups = [self.groups[index] for index in self._backward_position]
        by_group = [[flat for layout, flat in flats if layout.group == group.name] for group in groups]
        return GradientReducer(by_group, [len(group.parameters) for group in groups], self._comm, self.monitor)

    def _install_hooks(self, parameters: dict[str, nn.Parameter]) -> None:
        indices = {group.name: index for index, group in enumerate(self.groups)}
        counts = [0] * len(self.groups)
        for flat, layout in enumerate(self.layouts):
            group = indices[layout.group]
            for index, slot in enumerate(layout.slots):
                destination = _GradientDestination(slot.spec.name, flat, index, group, counts[group])
                self._install_hook(parameters[slot.spec.name], destination)
                counts[group] += 1

    def _install_hook(self, parameter: nn.Parameter, destination: _GradientDestination) -> None:
        owner = ref(self)  # a parameter that refers to the state would be a cycle, which frees late

        def on_gradient(parameter: Tensor) -> None:
            state = owner()
            grad, parameter.grad = parameter.grad, None  # else autograd would add the next one to it
            if state is None or not state.in_backward:
                raise UsageError(
                    f"'{destination.name}' got a gradient outside engine.backward; call engine.backward(loss) instead"
                )
            if grad is not None:  # a user's autograd function may return None; the gradient is then zero
                state._receive(destination, grad)

        parameter.register_post_accumulate_grad_hook(on_gradient)

    def _receive(self, destination: _GradientDestination, grad: Tensor) -> None:
        position = self._backward_position[destination.group]
        if self.reducer.is_duplicate(position, destination.number):
            raise UsageError(
                f"'{destination.name}' got a second gradient in one micro-batch; reentrant activation checkpointing "
                f"does this, use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        self.monitor.record_magnitude(grad)  # before it is weighted, rounded or summed
        self._flat_gradients[destination.flat].receive(destination.slot, grad, self.weight)
        self.reducer.complete(position, destination.number)
        if self.unshard_scheduler is not None:
            self.unshard_scheduler.gradient_received(destination.group)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of one micro-batch's backward; gradients outside it are refused."""
        with self.unshard_scheduler.backward() if self.unshard_scheduler is not None else nullcontext():
            self.in_backward = True
            try:
                yield
            finally:
                self.in_backward = False

    # -- the update ------------------------------------------------------------------------------------------------

    def update_slices(self) -> list[list[UpdateSlice]]:
        """Returns the arena by segment, each cut where the weight-decay class changes, or at each FP8 weight."""
        slices = []
        for number, segment in enumerate(self.arena.segments):
            replica = self.replicas[number]
            if segment.layout.dtype == E4M3:
                ranges = self.scales.cast_ranges(number)
            else:
                target = None if replica.shares_master else replica.local[0]
                ranges = [CastRange(*found, target) for found in segment.class_ranges()]
            slices.append([self._update_slice(number, cast) for cast in ranges])
        return slices

    def _update_slice(self, number: int, cast: CastRange) -> UpdateSlice:
        start = self.arena.segments[number].arena_start
        in_segment = slice(cast.start, cast.stop)
        in_arena = slice(start + cast.start, start + cast.stop)
        return UpdateSlice(
            cast.decayed,
            master=self.master[in_arena],
            main_grad=self.main_grads[number][in_segment],
            exp_avg=self.exp_avg[in_arena],
            exp_avg_sq=self.exp_avg_sq[in_arena],
            replica=None if cast.replica is None else cast.replica[in_segment],
            scale=cast.scale,
            amax=cast.amax,
        )

    def refresh_replicas(
        self, update: Callable[[Sequence[int]], None] | None = None, skipped: Tensor | None = None
    ) -> None:
        """Casts the masters into the compute replicas, and all-gathers sharded results; all ranks call.

        FP8 weights with current scales are deferred: their cast needs the largest magnitudes over all ranks, which are
        reduced while the other segments are updated.

        Args:
            update: updates the masters and replicas of the segments with given numbers, so that the first groups are
                gathered while others are still updated; None casts the masters as they are.
            skipped: with ``update``: whether it changes nothing, decided on the device; 0-dim.
        """
        gathers = self._placements.master is Placement.SHARD and self._placements.compute is Placement.REPLICATE
        if self.unshard_scheduler is not None:  # what is unsharded now would keep the old values
            self.unshard_scheduler.reshard()
        deferred = self.scales.begin(skipped)
        if deferred:
            if update is not None:
                update(deferred)
            self.scales.measure(deferred)
        maximum = self.scales.start_maximum() if deferred else Pending()
        pending = []
        for numbers in self._buckets(deferred, gathers=gathers):
            if update is not None:
                update(numbers)
            else:
                self._cast(numbers)
            for number in numbers:
                pending += self.replicas[number].start_all_gather() if gathers else []
        maximum.wait()
        if deferred:
            self.scales.cast(deferred)
        else:  # the updates above have measured the largest magnitudes for the next scales
            pending.append(self.scales.start_maximum())
        for number in deferred:
            pending += self.replicas[number].start_all_gather() if gathers else []
        for work in pending:  # before the next vote: [Note: buffer reuse]
            work.wait()
        for replica in self.replicas:  # after the waits: operands are made from gathered values
            replica.views.invalidate()

    def _buckets(self, deferred: Sequence[int], *, gathers: bool) -> list[list[int]]:
        """Returns the segments that are not deferred, in forward order, by the call of the update that takes them.

        On a CPU each segment has a call, so that its masters are in the cache when they are cast. On a GPU a call is a
        launch: one for all segments, or, if they are gathered after it, a few, so that gathers start early.
        """
        numbers = [number for number in range(len(self.arena.segments)) if number not in deferred]
        if self._device.type == "cpu":
            return [[number] for number in numbers]
        limit = self.arena.numel / (_GATHER_BUCKETS if gathers and self._comm.world_size > 1 else 1)
        buckets: list[list[int]] = []
        filled = math.inf
        for number in numbers:
            if filled >= limit:
                buckets.append([])
                filled = 0
            buckets[-1].append(number)
            filled += self.arena.segments[number].numel
        return buckets

    def _cast(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            segment, replica = self.arena.segments[number], self.replicas[number]
            if not replica.shares_master:
                replica.local[0].copy_(self.master[segment.arena_start : segment.arena_stop])

    # -- the norm --------------------------------------------------------------------------------------------------

    def owned_main_grads(self) -> Iterator[tuple[FlatLayout, Tensor]]:
        """Yields this rank's shard of every main grad, at every stage, so that all ranks cover each element once."""
        for segment, main_grad in zip(self.arena.segments, self.main_grads, strict=True):
            start, stop = segment.layout.shard(self._comm.rank)
            yield segment.layout, main_grad[start - segment.flat_start : stop - segment.flat_start]

    def chunk_squares(self) -> Tensor:
        """Returns FP64 [chunks of this rank], the sums of squares of the main grads' chunks.

        The FP32 norm of 1,024 elements is precise enough and twenty times faster than one in FP64. A gradient counts as
        not finite if it overflows, above 1.8e19 in a chunk.
        """
        norms = [torch.linalg.vector_norm(grad.view(-1, CHUNK), dim=1) for _, grad in self.owned_main_grads()]
        return torch.cat(norms).double().square_()

    def canonical_sum(self, chunk_squares: Tensor) -> Tensor:
        """Returns the global sum of squares, 0-dim FP64, added in chunk order at every world size."""
        rows = self._comm.gather_rows(chunk_squares, label="chunk squares")
        squares, column = [], 0
        for layout in self.layouts:
            width = layout.shard_numel // CHUNK
            # without the padding that the world size adds: zeros too would change the order of the sum
            squares.append(rows[:, column : column + width].reshape(-1)[: layout.real_numel // CHUNK])
            column += width
        return torch.cat(squares).sum()

    @property
    def backward_order(self) -> list[FlatLayout]:
        """Flat buffers in the order in which backward completes them."""
        positions = {self.groups[index].name: position for index, position in self._backward_position.items()}
        return sorted(self.layouts, key=lambda layout: positions[layout.group])

    @property
    def backward_names(self) -> list[str]:
        """Trainable parameters in the order in which backward is expected to reach them."""
        return [slot.spec.name for layout in self.backward_order for slot in reversed(layout.slots)]

    # -- logical access --------------------------------------------------------------------------------------------

    def owned_intervals(self) -> Iterator[tuple[ShardInterval, int]]:
        """Yields (interval, its start in the arena) of this rank's shard, which it saves, at every stage."""
        for segment in self.arena.segments:
            start, stop = segment.layout.shard(self._comm.rank)
            for interval in segment.layout.intervals(start, stop):
                yield interval, segment.arena_start + start - segment.flat_start + interval.offset

    def local_intervals(self) -> Iterator[tuple[ShardInterval, int]]:
        """Yields (interval, its start in the arena) of all that this rank holds and must load."""
        for segment in self.arena.segments:
            for interval in segment.intervals():
                yield interval, segment.arena_start + interval.offset

    def full_tensors(self, arena: Tensor) -> Iterator[tuple[ParamSpec, Tensor]]:
        """Yields every parameter of ``arena`` (master or a moment) in full, FP32, buffer by buffer; all ranks call."""
        for segment in self.arena.segments:
            yield from self._full_segment(segment, arena[segment.arena_start : segment.arena_stop])

    def full_main_grads(self) -> Iterator[tuple[ParamSpec, Tensor]]:
        """Yields every main grad in full, still scaled and weighted; all ranks call."""
        for segment, main_grad in zip(self.arena.segments, self.main_grads, strict=True):
            # a copy, because the next backward may write the main grad before all ranks have read it
            yield from self._full_segment(segment, main_grad.clone())

    def _full_segment(self, segment: ArenaSegment, local: Tensor) -> Iterator[tuple[ParamSpec, Tensor]]:
        layout = segment.layout
        full = local
        if segment.numel != layout.numel:
            full = self._zeros(layout.numel)
            self._comm.all_gather(full, local, label=f"full {layout.name}").wait()
        for slot in layout.slots:
            yield slot.spec, full[slot.start : slot.stop].view(slot.spec.shape)

    # -- memory ----------------------------------------------------------------------------------------------------

    def storages(self) -> dict[str, list[Tensor]]:
        """Returns the tensors that hold this rank's model states, by the kinds of ``engine.memory()``."""
        return {
            "compute": [*(tensor for replica in self.replicas for tensor in replica.persistent), *self.scales.tensors],
            "unsharded": [tensor for replica in self.replicas for tensor in replica.unsharded],
            "main_grad": self._grad_storages,
            "master": [self.master],
            "moments": [self.exp_avg, self.exp_avg_sq],
            "unreduced_grad": self._gradient_buffers.idle(),
        }
