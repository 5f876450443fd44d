"""The model states of one rank - replicas, main grads, masters, moments - placed by a row of the stage table."""

from __future__ import annotations

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
from dtrain.parameters.groups import ParamGroup, find_groups, matching_parameters, move_to_root
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.parameters.weight_decay import decayed_names
from dtrain.precision.contract import Contract
from dtrain.precision.float8.cast import E4M3
from dtrain.sharding.accumulate import RunningSum, TreeSum
from dtrain.sharding.execution_order import ShardedGroup
from dtrain.sharding.float8_scales import Cast, CurrentScales, DelayedScales, ScaleTable
from dtrain.sharding.layout import CHUNK, ArenaLayout, ArenaSegment, FlatLayout, ParamSpec, ShardInterval, flat_layouts
from dtrain.sharding.micro_batch_gradients import MicroBatchGradient, MicroBatchGradientBuffers, MicroBatchGradientSpec
from dtrain.sharding.placement import Placement, Placements
from dtrain.sharding.quantized_replicas import Float8Views
from dtrain.sharding.reduce import FlatGradient, GradientReducer, ShardedGradient, UnshardedGradient
from dtrain.sharding.replicas import ParameterViews, ReplicaBuffer, ShardedReplica
from dtrain.sharding.unshard import UnshardOptions, UnshardScheduler


@dataclass(frozen=True)
class _GradientDestination:
    """Where a parameter's gradient goes: flat buffer and slot; its group and its number there."""

    name: str
    flat: int
    slot: int
    group: int
    number: int


class ShardedState:
    """Takes a model's trainable parameters over: FP32 into the arena, replicas into flat buffers.

    All ranks build it together.

    Args:
        model: on its device; its parameters become views of the replicas.
        contract: the replica dtype of every parameter.
        placements: a row of the stage table.
        comm: the ranks that share.
        groups: see :func:`dtrain.parameters.groups.find_groups`.
        reproducible: sum leaves along the canonical tree.
        all_reduce: with replicated gradients and sharded masters (stage 1), all-reduce instead of reduce-scatter.
        gather: with sharded compute replicas (stage 3), when they are gathered and freed.
        peak_lr: how much an update changes a weight at most, about; for delayed scales.

    Attributes:
        scales: of the FP8 replicas.
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
        gather: UnshardOptions,
        peak_lr: float,
    ) -> None:
        self._comm = comm
        self._placements = placements
        self._contract = contract
        self._all_reduce = all_reduce
        self._device = comm.device
        self.reproducible = reproducible
        found = self._with_islands_in_root(find_groups(model, groups))
        self.groups = move_to_root(found, matching_parameters(model, gather.keep_gathered))
        self._decayed = decayed_names(model)
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
        # one rank's shard is the whole
        shards_compute = placements.compute is Placement.SHARD and comm.world_size > 1
        replica_type = ShardedReplica if shards_compute else ReplicaBuffer
        self._table = ScaleTable(self.layouts, contract.policy.float8.recipe == "rowwise", self._device)
        self.replicas = [
            replica_type(segment, self._views(segment.layout, parameters), comm) for segment in self.arena.segments
        ]
        self.scales = self._float8_scales(peak_lr)
        self.gathering = UnshardScheduler(model, self._gathered_groups(), gather, comm) if shards_compute else None
        self._grad_storages: list[Tensor] = []
        self.monitor = GradientMonitor(sum(len(layout.slots) for layout in self.layouts))
        self._position = self._order_groups()
        self.main_grads, flats = self._gradients()
        self.reducer = self._reducer(layouts, flats)
        self._flats = flats
        self._install_hooks(layouts, parameters)
        self.weight = Weight(torch.ones((), dtype=torch.float32, device=self._device), is_one=True)
        self.in_backward = False
        self.refresh_replicas()

    # -- construction ----------------------------------------------------------------------------------------------

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=torch.float32, device=self._device)

    def _with_islands_in_root(self, groups: tuple[ParamGroup, ...]) -> tuple[ParamGroup, ...]:
        """Where a unit has low and FP32 parameters, the FP32 ones (norms) join the root's; beside FP8, biases do too.

        They are few and small: a flat buffer of their own in every unit would be mostly padding, and would double the
        number of collectives.
        """
        dtypes = self._contract.replica_dtypes
        fp32_modules: set[str] = set()
        for group in groups:
            narrowest = min((dtypes[name] for name, _ in group.parameters), key=lambda dtype: dtype.itemsize)
            fp32_modules |= {
                name
                for name, p in group.parameters
                if dtypes[name] != narrowest and (dtypes[name] == torch.float32 or (narrowest == E4M3 and p.dim() < 2))
            }
        return move_to_root(groups, fp32_modules)

    def _layouts_of(self, group: ParamGroup) -> tuple[FlatLayout, ...]:
        specs = [
            ParamSpec(name, tuple(p.shape), self._contract.replica_dtypes[name], name in self._decayed)
            for name, p in group.parameters
        ]
        return flat_layouts(group.name, specs, self._comm.world_size)

    def _views(self, layout: FlatLayout, parameters: dict[str, nn.Parameter]) -> ParameterViews:
        if layout.dtype != E4M3:
            return ParameterViews(layout, parameters)
        recipe = self._contract.recipe
        assert recipe is not None
        return Float8Views(layout, parameters, self._table, recipe)

    def _float8_scales(self, peak_lr: float) -> CurrentScales:
        replicas = [replica.own for replica in self.replicas]
        comm = self._comm if self._placements.master is Placement.SHARD else None
        recipe = self._contract.recipe
        compiled = recipe is not None and recipe.compile
        parts = (self._table, self.arena.segments, self.master, replicas, comm)
        if self._contract.policy.float8.weight_scale == "delayed":
            return DelayedScales(*parts, peak_lr=peak_lr, compiled=compiled)
        return CurrentScales(*parts, compiled=compiled)

    def grad_dtype(self, layout: FlatLayout) -> torch.dtype:
        """Of the gradients of the parameters in a flat buffer, as they leave backward."""
        return self._contract.parameter_dtype(layout.slots[0].spec.name)

    def attach(self, model: nn.Module) -> None:
        """Lets the model's Linears that compute in FP8 find their weights here."""
        for replica in self.replicas:
            if isinstance(replica.views, Float8Views):
                replica.views.attach(model)

    def _gathered_groups(self) -> list[ShardedGroup]:
        sharded = [replica for replica in self.replicas if isinstance(replica, ShardedReplica)]
        return [ShardedGroup(group, [r for r in sharded if r.layout.group == group.name]) for group in self.groups]

    def _gradients(self) -> tuple[list[Tensor], list[FlatGradient]]:
        """The main grad of each segment and the gradient object of each flat buffer."""
        alone = self._comm.world_size == 1
        holds_all = self._placements.master is Placement.REPLICATE or alone
        # with one rank nothing travels, so gradients can accumulate where they belong
        reduces_every_micro_batch = self._placements.reduces_every_micro_batch(reproducible=self.reproducible)
        reduce_every_micro_batch = reduces_every_micro_batch and (self.reproducible or not alone)
        leaves = self._micro_batch_gradients(reduce_every_micro_batch)
        main_grads: list[Tensor] = []
        flats: list[FlatGradient] = []
        arena: Tensor | None = None
        if holds_all:
            arena = self._comm.allocate(self.arena.numel, torch.float32)
        elif reduce_every_micro_batch:
            arena = self._zeros(self.arena.numel)
        if arena is not None:
            self._grad_storages.append(arena)
        for segment in self.arena.segments:
            layout = segment.layout
            full = None
            if arena is not None:
                main_grad = arena[segment.arena_start : segment.arena_stop]
            else:
                full = self._comm.allocate(layout.numel, torch.float32)
                self._grad_storages.append(full)
                main_grad = full[segment.flat_start : segment.flat_start + segment.numel]
            main_grads.append(main_grad)
            leaf = leaves.get(layout.name)
            if reduce_every_micro_batch:
                flats.append(self._sharded_gradient(layout, main_grad, leaves[layout.name]))
            elif full is None:
                flats.append(UnshardedGradient(layout, self._comm, main_grad, True, leaf))
            else:
                flats.append(UnshardedGradient(layout, self._comm, full, self._all_reduce, leaf))
        return main_grads, flats

    def _micro_batch_gradients(self, reduce_every_micro_batch: bool) -> dict[str, MicroBatchGradient]:
        """By the name of the flat buffer; of all, or where FP32 sums travel of those that are rounded for it."""
        dtype_during_reduction = self._contract.policy.dtype_during_reduction
        specs = [
            MicroBatchGradientSpec(layout, dtype_during_reduction(self.grad_dtype(layout)))
            for layout in self.backward_order
        ]
        if not reduce_every_micro_batch:
            travels = self._comm.world_size > 1
            specs = [spec for spec in specs if travels and spec.dtype != torch.float32]
        num_last = sum(spec.layout.group == specs[-1].layout.group for spec in specs)
        self._leaves = MicroBatchGradientBuffers(self._comm, specs, num_last)
        return {spec.layout.name: leaf for spec, leaf in zip(specs, self._leaves.buffers, strict=True)}

    def _sharded_gradient(self, layout: FlatLayout, main_grad: Tensor, leaf: MicroBatchGradient) -> ShardedGradient:
        start, stop = layout.shard(self._comm.rank)
        own = main_grad if main_grad.numel() == layout.shard_numel else main_grad[start:stop]
        gradient_sum = TreeSum() if self.reproducible else RunningSum(own)
        return ShardedGradient(layout, self._comm, leaf, gradient_sum, main_grad)

    def _order_groups(self) -> dict[int, int]:
        """Index of each group -> its place in the order in which backward completes them: the root is the last."""
        order = sorted(range(len(self.groups)), key=lambda i: (self.groups[i].name == "", -i))
        return {group: position for position, group in enumerate(order)}

    def _reducer(self, layouts: list[tuple[FlatLayout, ...]], flats: list[FlatGradient]) -> GradientReducer:
        remaining = iter(flats)
        by_group = [[next(remaining) for _ in group] for group in layouts]
        counts = [len(group.parameters) for group in self.groups]
        return GradientReducer(
            [by_group[i] for i in self._position], [counts[i] for i in self._position], self._comm, self.monitor
        )

    def _install_hooks(self, layouts: list[tuple[FlatLayout, ...]], parameters: dict[str, nn.Parameter]) -> None:
        flat = 0
        for group, group_layouts in enumerate(layouts):
            number = 0
            for layout in group_layouts:
                for slot, place in enumerate(layout.slots):
                    self._install_hook(
                        parameters[place.spec.name], _GradientDestination(place.spec.name, flat, slot, group, number)
                    )
                    number += 1
                flat += 1

    def _install_hook(self, parameter: nn.Parameter, place: _GradientDestination) -> None:
        owner = ref(self)  # a parameter that holds the state would close a circle that nothing frees

        def on_gradient(parameter: Tensor) -> None:
            state = owner()
            grad, parameter.grad = parameter.grad, None
            if state is None or not state.in_backward:
                raise UsageError(
                    f"'{place.name}' got a gradient outside engine.backward; call engine.backward(loss) instead"
                )
            assert grad is not None
            state._receive(place, grad)

        parameter.register_post_accumulate_grad_hook(on_gradient)

    def _receive(self, place: _GradientDestination, grad: Tensor) -> None:
        position = self._position[place.group]
        if self.reducer.is_duplicate(position, place.number):
            raise UsageError(
                f"'{place.name}' got a second gradient in one micro-batch; reentrant activation checkpointing does "
                f"this, use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        self.monitor.record_magnitude(grad)
        self._flats[place.flat].receive(place.slot, grad, self.weight)
        self.reducer.complete(position, place.number)
        if self.gathering is not None:
            self.gathering.received(place.group)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """The context of one micro-batch's backward; gradients that come outside it are refused."""
        with self.gathering.backward() if self.gathering is not None else nullcontext():
            self.in_backward = True
            try:
                yield
            finally:
                self.in_backward = False

    # -- the update ------------------------------------------------------------------------------------------------

    def update_slices(self) -> list[list[UpdateSlice]]:
        """The arena, segment by segment, each cut where the weight-decay class changes, or between weights."""
        slices = []
        for number, segment in enumerate(self.arena.segments):
            if segment.layout.dtype == E4M3:
                casts = self.scales.casts(number)
            else:
                casts = [Cast(*found, self.replicas[number].own[0]) for found in segment.class_ranges()]
            slices.append([self._update_slice(number, cast) for cast in casts])
        return slices

    def _update_slice(self, number: int, cast: Cast) -> UpdateSlice:
        start = self.arena.segments[number].arena_start
        own = slice(cast.start, cast.stop)
        place = slice(start + cast.start, start + cast.stop)
        return UpdateSlice(
            cast.decayed,
            master=self.master[place],
            main_grad=self.main_grads[number][own],
            exp_avg=self.exp_avg[place],
            exp_avg_sq=self.exp_avg_sq[place],
            replica=None if cast.replica is None else cast.replica[own],
            scale=cast.scale,
            amax=cast.amax,
        )

    def refresh_replicas(self, update: Callable[[int], None] | None = None, skipped: Tensor | None = None) -> None:
        """Makes the compute replicas what the masters are, in forward order, and gathers what other ranks own.

        FP8 weights with current scales come last: their largest magnitudes on all ranks must be known first, and travel
        while the rest is updated.

        Args:
            update: called with the number of each segment to update its master and its replica, so that the first
                groups travel while others are still updated; None casts the masters as they are.
            skipped: with ``update``: whether it changes nothing, decided on the device; 0-dim.
        """
        gather = self._placements.master is Placement.SHARD and self._placements.compute is Placement.REPLICATE
        if self.gathering is not None:
            self.gathering.reshard()
        late = self.scales.begin(skipped)
        for number in late:
            if update is not None:
                update(number)
            self.scales.measure(number)
        maximum = self.scales.exchange() if late else Pending()
        pending = []
        for number, (segment, replica) in enumerate(zip(self.arena.segments, self.replicas, strict=True)):
            if number in late:
                continue
            if update is None:
                replica.own[0].copy_(self.master[segment.arena_start : segment.arena_stop])
            else:
                update(number)
            pending += replica.start_all_gather() if gather else []
        maximum.wait()
        for number in late:
            self.scales.cast(number)
            pending += self.replicas[number].start_all_gather() if gather else []
        if not late:
            pending.append(self.scales.exchange())
        for work in pending:
            work.wait()
        for replica in self.replicas:
            replica.views.invalidate()

    # -- the norm --------------------------------------------------------------------------------------------------

    def own_main_grads(self) -> Iterator[tuple[FlatLayout, Tensor]]:
        """This rank's shard of every main grad, at every stage: replicated elements are counted once."""
        for segment, main_grad in zip(self.arena.segments, self.main_grads, strict=True):
            start, stop = segment.layout.shard(self._comm.rank)
            yield segment.layout, main_grad[start - segment.flat_start : stop - segment.flat_start]

    def chunk_squares(self) -> Tensor:
        """FP64 [chunks of this rank]: sums of squares of the main grads' chunks; not finite where a chunk is not.

        The FP32 norm of 1,024 elements is precise enough and twenty times faster than one in FP64. Where it overflows,
        above 1.8e19 in a chunk, the gradient counts as not finite.
        """
        parts = [torch.linalg.vector_norm(grad.view(-1, CHUNK), dim=1) for _, grad in self.own_main_grads()]
        return torch.cat(parts).double().square_()

    def canonical_sum(self, chunk_squares: Tensor) -> Tensor:
        """The global sum of squares, 0-dim FP64, added in chunk order whatever the world size."""
        rows = self._comm.gather_rows(chunk_squares, label="chunk squares")
        parts, column = [], 0
        for layout in self.layouts:
            width = layout.shard_numel // CHUNK
            parts.append(rows[:, column : column + width].reshape(-1)[: layout.real_numel // CHUNK])
            column += width
        return torch.cat(parts).sum()

    @property
    def backward_order(self) -> list[FlatLayout]:
        """The flat buffers in the order in which backward completes them."""
        positions = {self.groups[index].name: position for index, position in self._position.items()}
        return sorted(self.layouts, key=lambda layout: positions[layout.group])

    @property
    def backward_names(self) -> list[str]:
        """All trainable parameters in the order in which backward reaches them, as far as that is known beforehand."""
        return [slot.spec.name for layout in self.backward_order for slot in reversed(layout.slots)]

    # -- logical access --------------------------------------------------------------------------------------------

    def owned_intervals(self) -> Iterator[tuple[ShardInterval, int]]:
        """(interval, its place in the arena) of what this rank saves: its shard, at every stage."""
        for segment in self.arena.segments:
            start, stop = segment.layout.shard(self._comm.rank)
            for part in segment.layout.intervals(start, stop):
                yield part, segment.arena_start + start - segment.flat_start + part.offset

    def held_intervals(self) -> Iterator[tuple[ShardInterval, int]]:
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
            # a copy of its own: the next backward may write the main grad before all ranks have read it
            yield from self._full_segment(segment, main_grad.clone())

    def _full_segment(self, segment: ArenaSegment, part: Tensor) -> Iterator[tuple[ParamSpec, Tensor]]:
        layout = segment.layout
        full = part
        if segment.numel != layout.numel:
            full = self._zeros(layout.numel)
            self._comm.all_gather(full, part.contiguous(), label=f"full {layout.name}").wait()
        for slot in layout.slots:
            yield slot.spec, full[slot.start : slot.stop].view(slot.spec.shape)

    # -- memory ----------------------------------------------------------------------------------------------------

    def storages(self) -> dict[str, list[Tensor]]:
        """The tensors that hold this rank's model states, by kind; those gathered now, and idle leaf buffers, apart."""
        return {
            "compute": [*(tensor for replica in self.replicas for tensor in replica.held), *self.scales.held],
            "unsharded": [tensor for replica in self.replicas for tensor in replica.unsharded],
            "main_grad": self._grad_storages,
            "master": [self.master],
            "moments": [self.exp_avg, self.exp_avg_sq],
            "unreduced_grad": self._leaves.idle(),
        }
