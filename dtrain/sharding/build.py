"""Builds the sharded model: groups, layouts, and the tensors of each flat buffer on this rank.

[Note: construction order] A sharded model is built in this order, the same on all ranks, because
``Communicator.allocate`` and ``gradient_exchange`` are collectives:

1. Layouts: arithmetic only.
2. For each flat buffer: replica and master; the master takes the parameters' unrounded values, then the parameters
   become views of the replica, which frees their own values.
3. Main grads and the send buffers of gradients.
4. Scales of FP8 replicas, the scheduler of stage 3, the gradient hooks.
5. The first refresh, which fills the replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from dtrain.distributed.communicator import Communicator, GradientSend
from dtrain.distributed.gradient_buffers import num_kept_in_flight
from dtrain.optim.rule import StateSpec
from dtrain.parameters.groups import (
    ParamGroup,
    backward_order,
    decayed_names,
    find_groups,
    matching_parameters,
    move_to_root,
)
from dtrain.precision.contract import Contract
from dtrain.precision.float8.cast import E4M3
from dtrain.precision.float8.weights import TransposeSet
from dtrain.sharding.accumulate import RunningSum, TreeSum
from dtrain.sharding.arena import Arena, split
from dtrain.sharding.float8_casts import Float8Shard, ScaleTable
from dtrain.sharding.float8_scales import Float8Scales
from dtrain.sharding.gradients import (
    AccumulatedGradient,
    ExchangedGradient,
    FlatGradient,
    ReductionQueue,
    RoundedGradient,
)
from dtrain.sharding.group import FlatBuffer, ParameterGroup
from dtrain.sharding.layout import ArenaSegment, FlatLayout, ParamSpec, flat_layouts
from dtrain.sharding.model import ShardedModel
from dtrain.sharding.placement import Placements
from dtrain.sharding.quantized_replicas import Float8Views
from dtrain.sharding.reduce import GradientReducer
from dtrain.sharding.replicas import ParameterViews, Replica, ShardedReplica
from dtrain.sharding.storage_pool import StoragePool
from dtrain.sharding.unshard import UnshardScheduler


@dataclass(frozen=True)
class ShardingOptions:
    """How a model is sharded.

    Attributes:
        placements: a row of the stage table.
        reproducible: sum micro-batch gradients along the canonical tree.
        units: see :func:`dtrain.parameters.groups.find_groups`.
        keep_gathered: name patterns of modules and parameters that join the root group.
        reshard_after_forward: see :class:`dtrain.sharding.unshard.UnshardScheduler`, as ``prefetch``.
        states: the optimizer's states.
    """

    placements: Placements
    reproducible: bool
    units: str | Sequence[str]
    keep_gathered: Sequence[str]
    reshard_after_forward: bool
    prefetch: int
    states: Sequence[StateSpec]


def build(model: nn.Module, contract: Contract, comm: Communicator, options: ShardingOptions) -> ShardedModel:
    """Moves a model's trained parameters into flat buffers and FP32 masters; all ranks call.

    Args:
        model: on its device; its parameters become views of the replicas.
        contract: the replica dtype of every parameter.
        comm: the ranks that share the states.
        options: how.
    """
    trained, frozen = (_find_groups(model, contract, options, frozen=frozen) for frozen in (False, True))
    decayed = decayed_names(model)
    layouts = [layout for group in trained for layout in _layouts(group, contract, comm, decayed)]
    segments = [options.placements.master.segment(layout, comm.rank) for layout in layouts]
    rowwise = contract.policy.float8.recipe == "rowwise"
    replicas = _Replicas(dict(model.named_parameters()), contract, comm, options.placements, layouts, rowwise)
    stored = [replicas.trained(segment) for segment in segments]
    arena, gradients = _gradients(segments, trained, contract, comm, options)
    buffers = [
        FlatBuffer(segment, replica, master, dict(zip(arena.states, states, strict=True)), gradient)
        for segment, (replica, master), gradient, *states in zip(
            segments, stored, gradients, *(split(state, segments) for state in arena.states.values()), strict=True
        )
    ]
    kept = [replica for group in frozen for replica in replicas.frozen(group)]
    order = [name for name, _ in model.named_modules(remove_duplicate=False)]
    names = sorted({group.name for group in (*trained, *frozen)}, key=order.index)
    groups = [
        ParameterGroup(
            name,
            [buffer for buffer in buffers if buffer.layout.group == name],
            [replica for replica in kept if replica.layout.group == name],
        )
        for name in names
    ]
    groups = [group for group in groups if group.replicas]
    by_name = {group.name: group for group in groups}
    backward = [by_name[trained[index].name] for index in backward_order(trained)]
    every_micro_batch = any(isinstance(gradient, ExchangedGradient) for gradient in gradients)
    queue = ReductionQueue(len(buffers), arena.exchange, every_micro_batch=every_micro_batch)
    reducer = GradientReducer(backward, queue)
    scheduler = None
    if any(isinstance(replica, ShardedReplica) for group in groups for replica in group.replicas):
        scheduler = UnshardScheduler(
            model,
            groups,
            comm,
            replicas.pool,
            reshard_after_forward=options.reshard_after_forward,
            prefetch=options.prefetch,
        )
    scales = _scales(replicas.table, buffers, contract, comm)
    return ShardedModel(groups, arena, reducer, scales, scheduler, comm)


# -- groups and layouts ----------------------------------------------------------------------------------------------


def _find_groups(
    model: nn.Module, contract: Contract, options: ShardingOptions, *, frozen: bool
) -> tuple[ParamGroup, ...]:
    """Returns the groups of the trained or of the frozen parameters.

    The FP32 parameters (norms) of mixed groups join the root group; of FP8 groups, the biases too. They are few and
    small: a flat buffer of their own in every group would be mostly padding, and would double the number of
    collectives.
    """
    groups = find_groups(model, options.units, frozen=frozen)
    dtypes = contract.replica_dtypes
    moved = matching_parameters(model, options.keep_gathered)
    for group in groups:
        narrowest = min((dtypes[name] for name, _ in group.parameters), key=lambda dtype: dtype.itemsize)
        moved |= {
            name
            for name, p in group.parameters
            if dtypes[name] != narrowest and (dtypes[name] == torch.float32 or (narrowest == E4M3 and p.dim() < 2))
        }
    return move_to_root(groups, moved)


def _layouts(
    group: ParamGroup, contract: Contract, comm: Communicator, decayed: Collection[str]
) -> tuple[FlatLayout, ...]:
    specs = [
        ParamSpec(name, tuple(p.shape), contract.replica_dtypes[name], name in decayed, p.requires_grad)
        for name, p in group.parameters
    ]
    return flat_layouts(group.name, specs, comm.world_size)


# -- replicas and masters --------------------------------------------------------------------------------------------


class _Replicas:
    """Makes the replicas and masters of one flat buffer after the other."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        contract: Contract,
        comm: Communicator,
        placements: Placements,
        layouts: Sequence[FlatLayout],
        rowwise: bool,
    ) -> None:
        self._parameters = parameters
        self._contract = contract
        self._comm = comm
        self._placements = placements
        self.table = ScaleTable(layouts, rowwise, comm.device)
        self.pool = StoragePool(comm.device)
        self._transposes = TransposeSet()  # of whole replicas, whose transposes are made together
        separate = [placements.master.segment(layout, comm.rank) for layout in layouts if layout.dtype != torch.float32]
        numel = sum(segment.numel for segment in separate)
        self._masters = split(torch.zeros(numel, dtype=torch.float32, device=comm.device), separate)

    def trained(self, segment: ArenaSegment) -> tuple[Replica, Tensor]:
        """Returns the replica and the masters [segment.numel], with the parameters' unrounded values."""
        replica = self._replica(segment.layout)
        master = replica.local[0] if replica.shares_master else next(self._masters)
        self._fill(master, segment)
        replica.attach()
        return replica, master

    def frozen(self, group: ParamGroup) -> list[Replica]:
        """Returns the replicas of a group's frozen parameters, if replicas are sharded; else they stay as they are."""
        plain = tuple((name, p) for name, p in group.parameters if type(p) is nn.Parameter and p.is_floating_point())
        replicas = []
        for layout in _layouts(ParamGroup(group.name, plain), self._contract, self._comm, ()) if plain else ():
            segment = self._placements.compute.segment(layout, self._comm.rank)
            if segment.numel < layout.numel:
                replica = self._replica(layout)
                self._fill(replica.local[0], segment)
                replica.attach()
                replicas.append(replica)
        return replicas

    def _replica(self, layout: FlatLayout) -> Replica:
        is_whole = self._placements.compute.segment(layout, self._comm.rank).numel == layout.numel
        views = self._views(layout, is_whole)
        if is_whole:
            return Replica(layout, views, self._comm, self._placements)
        return ShardedReplica(layout, views, self._comm, self._placements, self.pool)

    def _views(self, layout: FlatLayout, is_whole: bool) -> ParameterViews:
        if layout.dtype != E4M3:
            return ParameterViews(layout, self._parameters)
        recipe = self._contract.recipe
        assert recipe is not None
        return Float8Views(layout, self._parameters, self.table, recipe, self._transposes if is_whole else None)

    def _fill(self, local: Tensor, segment: ArenaSegment) -> None:
        for interval in segment.intervals():
            source = self._parameters[interval.spec.name].detach().reshape(-1)[interval.start : interval.stop]
            local[interval.offset : interval.offset + source.numel()].copy_(source)


def _scales(table: ScaleTable, buffers: Sequence[FlatBuffer], contract: Contract, comm: Communicator) -> Float8Scales:
    float8 = [buffer for buffer in buffers if buffer.layout.dtype == E4M3]
    shards = [Float8Shard(buffer.segment, buffer.master, buffer.replica.local) for buffer in float8]
    # where every rank has all masters, it sees whole weights, so there is nothing to reduce
    is_sharded = any(buffer.segment.numel < buffer.layout.numel for buffer in float8)
    recipe = contract.recipe
    return Float8Scales(table, shards, comm if is_sharded else None, compiled=recipe is not None and recipe.compile)


# -- gradients -------------------------------------------------------------------------------------------------------


def _gradients(
    segments: Sequence[ArenaSegment],
    groups: Sequence[ParamGroup],
    contract: Contract,
    comm: Communicator,
    options: ShardingOptions,
) -> tuple[Arena, Sequence[FlatGradient]]:
    """Returns the arena, and the gradient of each segment."""
    order = [groups[index].name for index in backward_order(groups)]
    backward = sorted(segments, key=lambda segment: order.index(segment.layout.group))
    numel = sum(segment.numel for segment in segments)
    states = {
        state.name: torch.full((numel,), state.init, dtype=state.dtype, device=comm.device) for state in options.states
    }
    sends = {segment.layout.name: _send(segment.layout, contract) for segment in backward}
    held = [options.placements.gradient.segment(segment.layout, comm.rank) for segment in segments]
    is_whole = all(own.numel == own.layout.numel for own in held)
    if options.reproducible or not is_whole:
        # the root group, last in backward, is opened early
        num_early = sum(segment.layout.group == order[-1] for segment in backward)
        exchange = comm.gradient_exchange(list(sends.values()), num_early)
        is_gathered = any(segment.numel == segment.layout.numel for segment in segments)
        # the other ranks read it only in the all-gather of the sums
        allocate = comm.allocate if is_gathered else partial(torch.zeros, device=comm.device)
        grads = allocate(numel, dtype=torch.float32)
        gradient_sum = TreeSum if options.reproducible else RunningSum
        exchanged = [
            ExchangedGradient(segment, comm, main_grad, exchange, backward.index(segment), gradient_sum)
            for segment, main_grad in zip(segments, split(grads, segments), strict=True)
        ]
        return Arena(states, grads, exchange), exchanged
    full = comm.allocate(sum(own.numel for own in held), torch.float32)
    parts = list(zip(segments, split(full, held), strict=True))
    is_sent = any(segment.layout.shard_numel < segment.layout.numel for segment in segments)
    if is_sent and any(send.dtype != torch.float32 for send in sends.values()):
        exchange = comm.gradient_exchange(list(sends.values()), 0)
        rounded = [RoundedGradient(segment, comm, own, exchange, backward.index(segment)) for segment, own in parts]
        return Arena(states, full, exchange), rounded
    sizes = [own.nbytes for _, own in sorted(parts, key=lambda part: backward.index(part[0]))]
    return Arena(states, full, None), [
        AccumulatedGradient(segment, comm, own, num_kept_in_flight(sizes, backward.index(segment)))
        for segment, own in parts
    ]


def _send(layout: FlatLayout, contract: Contract) -> GradientSend:
    dtype = contract.policy.dtype_during_reduction(grad_dtype(layout, contract))
    return GradientSend(layout.name, layout.numel, dtype, layout.extents)


def grad_dtype(layout: FlatLayout, contract: Contract) -> torch.dtype:
    """Returns the dtype in which the gradients of a flat buffer's parameters leave backward."""
    return contract.parameter_dtype(layout.slots[0].spec.name)
