"""Builds the sharded model: groups, layouts, and the tensors of each flat buffer on this rank.

[Note: construction order] A sharded model is built in this order, the same on all ranks, because
``Communicator.allocate`` and ``gradient_exchange`` are collectives:

1. Layouts: arithmetic only.
2. For each flat buffer: replica and master; the master takes the parameters' unrounded values, then the parameters
   become views of the replica, which frees their own values.
3. Optimizer states, main grads and the send buffers of gradients.
4. Replicas of frozen parameters, scales of FP8 replicas, the scheduler of stage 3, the gradient hooks.
5. The first refresh, which fills the replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from dtrain.config.engines import Native
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.mesh import Mesh
from dtrain.parameters.groups import (
    ParamGroup,
    backward_order,
    find_groups,
    matching_parameters,
    move_to_root,
)
from dtrain.parameters.optimizer_plan import OptimizerPlan
from dtrain.precision.contract import Contract
from dtrain.precision.fake import is_plain
from dtrain.precision.float8.cast import E4M3
from dtrain.precision.float8.options import Recipe
from dtrain.precision.float8.weights import TransposeSet
from dtrain.precision.remainder import REMAINDER, Numbers, RemainderPair, read, write
from dtrain.sharding.build_gradients import GradientBuilder
from dtrain.sharding.float8_casts import Float8Shard, ScaleTable
from dtrain.sharding.float8_scales import Float8Scales
from dtrain.sharding.frozen_float8 import FrozenFloat8
from dtrain.sharding.group import FlatBuffer, HeldRange, ParameterGroup
from dtrain.sharding.layout import ArenaSegment, FlatLayout, ParamSpec, flat_layouts
from dtrain.sharding.model import ShardedModel
from dtrain.sharding.offload import HOST, Offload, offload_of
from dtrain.sharding.placement import STAGES, Placements
from dtrain.sharding.quantized_replicas import Float8Views
from dtrain.sharding.replicas import ParameterViews, Replica
from dtrain.sharding.storage_pool import StoragePool
from dtrain.sharding.unshard import UnshardScheduler


def build(model: nn.Module, contract: Contract, mesh: Mesh, options: Native, plan: OptimizerPlan) -> ShardedModel:
    """Moves a model's trained parameters into flat buffers and FP32 masters; all ranks call.

    Args:
        model: on its device; its parameters become views of the replicas.
        contract: the replica dtype of every parameter.
        mesh: the ranks that share the states, and those that hold the same shard.
        options: stage, units of sharding, reproducibility, and when stage 3 unshards and reshards.
        plan: the optimizer of each parameter, which defines the states.
    """
    offload, comm = offload_of(options, mesh.shard), mesh.shard
    trained = _find_groups(model, contract, options)
    frozen = _find_groups(model, contract, options, trained)
    order = [trained[index].name for index in backward_order(trained)]
    tensors = _Tensors(model, contract, comm, options, plan, _layouts(trained, contract, mesh, plan), offload)
    gradients = GradientBuilder(contract, mesh, options, order, offload)
    buffers = tensors.buffers(gradients)
    groups = _groups(model, buffers, list(tensors.frozen_replicas(_layouts(frozen, contract, mesh, plan))))
    reducer = gradients.reducer(groups)
    scheduler = None
    if any(replica.is_sharded for group in groups for replica in group.replicas):
        scheduler = UnshardScheduler(model, groups, options)
    return ShardedModel(groups, reducer, tensors.scales(buffers), scheduler, mesh, tensors.frozen_float8, offload)


# -- layouts -----------------------------------------------------------------------------------------------------------


def _find_groups(
    model: nn.Module, contract: Contract, options: Native, trained: Sequence[ParamGroup] | None = None
) -> tuple[ParamGroup, ...]:
    """Returns the groups of the trained parameters, or, given these, of the frozen ones.

    The FP32 parameters (norms) of mixed groups join the root group; of FP8 groups, the biases too. They are few and
    small: a flat buffer of their own in every group would be mostly padding, and would double the number of
    collectives. Frozen ones join it if the trained ones beside them are narrower, too.
    """
    groups = find_groups(model, options.sharding_units, frozen=trained is not None)
    dtypes = contract.replica_dtypes
    moved = matching_parameters(model, options.keep_gathered, "keep_gathered")
    for group in groups:
        beside = [name for other in trained or () if other.name == group.name for name, _ in other.parameters]
        names = [*beside, *(name for name, p in group.parameters if p.is_floating_point())]
        narrowest = min((dtypes[name] for name in names), key=lambda dtype: dtype.itemsize, default=None)
        moved |= {
            name
            for name, p in group.parameters
            if dtypes[name] != narrowest and (dtypes[name] == torch.float32 or (narrowest == E4M3 and p.dim() < 2))
        }
    return move_to_root(groups, moved)


def _layouts(groups: Sequence[ParamGroup], contract: Contract, mesh: Mesh, plan: OptimizerPlan) -> list[FlatLayout]:
    """Returns the flat buffers of ``groups``; frozen parameters that are not plain floating-point ones have none."""
    layouts: list[FlatLayout] = []
    for group in groups:
        specs = [
            ParamSpec(name, tuple(p.shape), contract.replica_dtypes[name], plan.numbers.get(name, 0), p.requires_grad)
            for name, p in group.parameters
            if p.requires_grad or (is_plain(p) and p.is_floating_point())
        ]
        layouts += flat_layouts(group.name, specs, mesh.shard.world_size, mesh.replicate.world_size)
    return layouts


def _groups(model: nn.Module, buffers: Sequence[FlatBuffer], frozen: Sequence[Replica]) -> list[ParameterGroup]:
    """Returns the groups in the order of definition."""
    found = {layout.group for layout in [*(one.layout for one in buffers), *(one.layout for one in frozen)]}
    return [
        ParameterGroup(
            name,
            [buffer for buffer in buffers if buffer.layout.group == name],
            [replica for replica in frozen if replica.layout.group == name],
        )
        for name, _ in model.named_modules()
        if name in found
    ]


# -- tensors -----------------------------------------------------------------------------------------------------------


class _Tensors:
    """The replicas, masters and states of [Note: construction order], and the replicas of frozen parameters.

    Attributes:
        frozen_float8: the frozen weights in FP8, by group; complete after ``frozen_replicas``.
    """

    def __init__(
        self,
        model: nn.Module,
        contract: Contract,
        comm: Communicator,
        options: Native,
        plan: OptimizerPlan,
        layouts: Sequence[FlatLayout],
        offload: Offload | None,
    ) -> None:
        self._contract = contract
        self._comm = comm
        self._options = options
        self._plan = plan
        self._layouts = layouts
        self._offload = offload
        self._placements = STAGES[options.zero_stage]
        self._state_device = comm.device if offload is None else HOST
        self._parameters = dict(model.named_parameters())
        recipe = contract.recipe or Recipe()  # without one there is no FP8 weight
        self._table = ScaleTable(layouts, recipe.weight_scaling, comm.device)
        self._transposes = TransposeSet()  # of whole replicas, whose transposes are made together
        self._pool = StoragePool(comm.device)  # of unsharded replicas
        self.frozen_float8: list[FrozenFloat8] = []

    def _replica(self, layout: FlatLayout) -> Replica:
        if layout.dtype == E4M3:
            is_whole = self._placements.compute.segment(layout, self._comm.rank).numel == layout.numel
            transposes = self._transposes if is_whole else None
            views: ParameterViews = Float8Views(
                layout, self._parameters, self._table, self._contract.recipe_of, transposes
            )
        else:
            views = ParameterViews(layout, self._parameters)
        is_offloaded = self._offload is not None
        return Replica(layout, views, self._comm, self._placements, self._pool, is_offloaded=is_offloaded)

    def frozen_replicas(self, layouts: Sequence[FlatLayout]) -> Iterator[Replica]:
        """Yields the replicas of frozen parameters that are sharded or FP8; the others stay as they are."""
        for layout in layouts:
            segment = self._placements.compute.segment(layout, self._comm.rank)
            if layout.dtype == E4M3:
                replica = self._frozen_float8(layout, segment)
            elif segment.numel < layout.numel:
                replica = self._replica(layout)
                self._fill(replica.local[0], segment)
            else:
                continue
            replica.attach()
            yield replica

    def _frozen_float8(self, layout: FlatLayout, segment: ArenaSegment) -> Replica:
        """Returns the replica of a group's frozen FP8 weights, cast from their unrounded values."""
        recipe = self._contract.recipe
        assert recipe is not None
        table = ScaleTable([layout], recipe.weight_scaling, self._comm.device, has_columns=False)
        # operands would take more memory than the weights, for good
        views = Float8Views(layout, self._parameters, table, self._contract.recipe_of, keeps_operands=False)
        # without masters: each rank casts all that it holds
        placements = Placements(*[self._placements.compute] * 3)
        replica = Replica(layout, views, self._comm, placements, self._pool)
        frozen = FrozenFloat8(replica, segment, table, self._comm)
        values = frozen.new_values()
        self._fill(values, segment)
        frozen.write(values)
        self.frozen_float8.append(frozen)
        return replica

    def _fill(self, local: Tensor, segment: ArenaSegment) -> None:
        for interval in segment.intervals():
            source = self._parameters[interval.spec.name].detach().reshape(-1)[interval.start : interval.stop]
            local[interval.offset : interval.offset + source.numel()].copy_(source)

    def buffers(self, gradients: GradientBuilder) -> list[FlatBuffer]:
        """Returns the flat buffers of the trained parameters, with what ``gradients`` builds.

        States, main grads, masters without an FP32 replica, and remainders lie in one contiguous tensor each.
        """
        segments = [self._placements.master.segment(layout, self._comm.rank) for layout in self._layouts]
        is_offloaded = self._offload is not None  # else [Note: FP32 replicas]
        separate = [segment for segment in segments if is_offloaded or segment.layout.dtype != torch.float32]
        paired = [segment for segment in separate if self._has_pair(segment.layout)]
        whole = [segment for segment in separate if not self._has_pair(segment.layout)]
        masters = iter(self._split(torch.zeros(sum(s.numel for s in whole), device=self._state_device), whole))
        remainders = torch.zeros(sum(s.numel for s in paired), dtype=REMAINDER, device=self._comm.device)
        halves = iter(self._split(remainders, paired))
        stored: list[tuple[Replica, Numbers]] = []
        for segment in segments:
            replica = self._replica(segment.layout)
            # the unrounded values, which the parameters hold until the replica is attached
            if self._has_pair(segment.layout):
                values = torch.zeros(segment.numel, device=self._comm.device)
                self._fill(values, segment)
                master: Numbers = RemainderPair(replica.local[0], next(halves))
                write(master, values)
            else:
                values = master = replica.local[0] if replica.shares_master else next(masters)
                self._fill(values, segment)
            replica.attach()
            stored.append((replica, master))
        states = {kind: self._states(kind, segments, [master for _, master in stored]) for kind in self._plan.specs}
        built = gradients.build(segments)
        targets = [replica.local[0] for replica, _ in stored]
        staging = [None] * len(segments) if self._offload is None else self._offload.staging(targets)
        return [
            FlatBuffer(segment, *stored[n], {kind: held[n] for kind, held in states.items()}, built[n], staging[n])
            for n, segment in enumerate(segments)
        ]

    def _has_pair(self, layout: FlatLayout) -> bool:
        """Whether the masters are held as pairs, of which the replica is one half."""
        return self._options.master == "remainder" and layout.dtype == torch.bfloat16

    def _states(self, kind: str, segments: Sequence[ArenaSegment], masters: Sequence[Numbers]) -> list[HeldRange]:
        """Returns state ``kind`` of each segment: of the range of the update classes that have it."""
        plan, spec, ranges = self._plan, self._plan.specs[kind], []
        for segment in segments:
            # with the padding, so that every rank holds the same number of bytes
            classes = segment.class_ranges(padded=True)
            found = [(low, high) for number, low, high in classes if plan.has_state(number, kind)]
            if any(one[1] != other[0] for one, other in pairwise(found)):
                raise ValueError(
                    f"the parameters of '{segment.layout.name}' with state '{kind}' are not adjacent: {found}"
                )
            ranges.append((found[0][0], found[-1][1]) if found else (0, 0))
        numels = [high - low for low, high in ranges]
        whole = torch.empty(sum(numels), dtype=spec.dtype, device=self._state_device)
        held = []
        parts = torch.split(whole, numels) if numels else ()
        for (low, high), values, master in zip(ranges, parts, masters, strict=True):
            spec.fill(values, read(master[low:high]))
            held.append(HeldRange(low, values))
        return held

    def _split(self, whole: Tensor, segments: Sequence[ArenaSegment]) -> Sequence[Tensor]:
        return torch.split(whole, [segment.numel for segment in segments]) if segments else ()

    def scales(self, buffers: Sequence[FlatBuffer]) -> Float8Scales:
        float8 = [buffer for buffer in buffers if buffer.layout.dtype == E4M3]
        shards = [Float8Shard(buffer.segment, read(buffer.master), buffer.replica.local) for buffer in float8]
        # where every rank has all masters, it sees whole weights, so there is nothing to reduce
        comm = self._comm if any(buffer.segment.numel < buffer.layout.numel for buffer in float8) else None
        recipe = self._contract.recipe
        return Float8Scales(self._table, shards, comm, compiled=recipe is not None and recipe.compile)
