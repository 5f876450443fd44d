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

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from dtrain.config.engines import Native
from dtrain.distributed.communicator import GradientExchange, GradientSend
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
from dtrain.precision.float8.weights import TransposeSet
from dtrain.precision.remainder import REMAINDER, Numbers, RemainderPair, read, write
from dtrain.sharding.accumulate import GradientSum, RunningSum, TreeSum
from dtrain.sharding.float8_casts import Float8Shard, ScaleTable
from dtrain.sharding.float8_scales import Float8Scales
from dtrain.sharding.frozen_float8 import FrozenFloat8
from dtrain.sharding.gradients import AccumulatedGradient, ExchangedGradient, FlatGradient
from dtrain.sharding.group import FlatBuffer, HeldRange, ParameterGroup
from dtrain.sharding.layout import ArenaSegment, FlatLayout, ParamSpec, flat_layouts
from dtrain.sharding.model import ShardedModel
from dtrain.sharding.offload import HOST, OffloadedGradient, offload_of
from dtrain.sharding.placement import STAGES, Placements
from dtrain.sharding.quantized_replicas import Float8Views
from dtrain.sharding.reduce import GradientReducer
from dtrain.sharding.replica_sum import ReplicaSum, RunningReplicaSum, SubtreesInFlight, TreeReplicaSum, across
from dtrain.sharding.replicas import ParameterViews, Replica
from dtrain.sharding.rounded_gradients import RoundedGradient, RoundedSum, StepNoise
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
    builder = _Builder(model, contract, mesh, options, plan)
    buffers, exchange = builder.buffers()
    groups = builder.groups(buffers)
    backward = sorted((group for group in groups if group.buffers), key=lambda group: builder.order.index(group.name))
    # on a CPU the rank itself would wait; a tree has exchanged its sums before
    overlaps = mesh.is_hybrid and not mesh.shard.device_is_host and not options.reproducible
    reducer = GradientReducer(backward, exchange, builder.noise, completes_early=overlaps)
    scheduler = None
    if any(replica.is_sharded for group in groups for replica in group.replicas):
        scheduler = UnshardScheduler(model, groups, mesh.shard, options)
    scales = builder.scales(buffers)
    return ShardedModel(groups, reducer, scales, scheduler, mesh, builder.frozen_float8, builder.offload)


class _Builder:
    """Steps 1 to 3 of [Note: construction order], and the replicas of frozen parameters.

    Attributes:
        order: names of the groups with trained parameters, in the order in which backward is expected to reach them.
        frozen_float8: the frozen weights in FP8, by group; complete after :meth:`groups`.
        offload: the masters, states and main grads lie on the host; None: on the rank's device.
        noise: rounds BF16 main grads; None: main grads are FP32.
    """

    def __init__(self, model: nn.Module, contract: Contract, mesh: Mesh, options: Native, plan: OptimizerPlan) -> None:
        self._model = model
        self._contract = contract
        self._comm = comm = mesh.shard
        self._mesh = mesh
        self._subtrees = SubtreesInFlight()
        self._options = options
        self._plan = plan
        self._placements = STAGES[options.zero_stage]
        self.offload = offload_of(options, comm)
        self._state_device = comm.device if self.offload is None else HOST
        self._parameters = dict(model.named_parameters())
        trained = self._find_groups()
        self.order = [trained[index].name for index in backward_order(trained)]
        self._frozen = self._find_groups(trained)
        self._layouts = [layout for group in trained for layout in self._layouts_of(group)]
        self._table = ScaleTable(self._layouts, contract.policy.float8.recipe == "rowwise", comm.device)
        self._transposes = TransposeSet()  # of whole replicas, whose transposes are made together
        self._pool = StoragePool(comm.device)  # of unsharded replicas
        self.frozen_float8: list[FrozenFloat8] = []
        self.noise = StepNoise(comm.device) if options.grad_dtype == "bf16" else None

    # -- groups and layouts ------------------------------------------------------------------------------------------

    def _find_groups(self, trained: Sequence[ParamGroup] | None = None) -> tuple[ParamGroup, ...]:
        """Returns the groups of the trained parameters, or, given these, of the frozen ones.

        The FP32 parameters (norms) of mixed groups join the root group; of FP8 groups, the biases too. They are few and
        small: a flat buffer of their own in every group would be mostly padding, and would double the number of
        collectives. Frozen ones join it if the trained ones beside them are narrower, too.
        """
        groups = find_groups(self._model, self._options.sharding_units, frozen=trained is not None)
        dtypes = self._contract.replica_dtypes
        moved = matching_parameters(self._model, self._options.keep_gathered, "keep_gathered")
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

    def _layouts_of(self, group: ParamGroup) -> tuple[FlatLayout, ...]:
        dtypes = self._contract.replica_dtypes
        specs = [
            ParamSpec(name, tuple(p.shape), dtypes[name], self._plan.numbers.get(name, 0), p.requires_grad)
            for name, p in group.parameters
        ]
        return flat_layouts(group.name, specs, self._comm.world_size, self._mesh.replicate.world_size)

    def groups(self, buffers: Sequence[FlatBuffer]) -> list[ParameterGroup]:
        """Returns the groups in the order of definition."""
        frozen = [replica for group in self._frozen for replica in self._frozen_replicas(group)]
        found = {layout.group for layout in (*self._layouts, *(replica.layout for replica in frozen))}
        return [
            ParameterGroup(
                name,
                [buffer for buffer in buffers if buffer.layout.group == name],
                [replica for replica in frozen if replica.layout.group == name],
            )
            for name, _ in self._model.named_modules()
            if name in found
        ]

    # -- replicas and masters ----------------------------------------------------------------------------------------

    def _replica(self, layout: FlatLayout) -> Replica:
        if layout.dtype == E4M3:
            assert self._contract.recipe is not None
            is_whole = self._placements.compute.segment(layout, self._comm.rank).numel == layout.numel
            transposes = self._transposes if is_whole else None
            views: ParameterViews = Float8Views(
                layout, self._parameters, self._table, self._contract.recipe, transposes
            )
        else:
            views = ParameterViews(layout, self._parameters)
        is_offloaded = self.offload is not None
        return Replica(layout, views, self._comm, self._placements, self._pool, is_offloaded=is_offloaded)

    def _frozen_replicas(self, group: ParamGroup) -> Iterator[Replica]:
        """Yields the replicas of a group's frozen parameters that are sharded or FP8; the others stay as they are."""
        plain = tuple((name, p) for name, p in group.parameters if is_plain(p) and p.is_floating_point())
        for layout in self._layouts_of(ParamGroup(group.name, plain)):
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
        table = ScaleTable([layout], recipe.rowwise, self._comm.device, has_columns=False)
        # operands would take more memory than the weights, for good
        views = Float8Views(layout, self._parameters, table, recipe, keeps_operands=False)
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

    def buffers(self) -> tuple[list[FlatBuffer], GradientExchange | None]:
        """Returns the flat buffers of the trained parameters, and the exchange of their gradients, if they are sent.

        States, main grads, masters without an FP32 replica, and remainders lie in one contiguous tensor each.
        """
        segments = [self._placements.master.segment(layout, self._comm.rank) for layout in self._layouts]
        is_offloaded = self.offload is not None  # else [Note: FP32 replicas]
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
        gradients, exchange = self._gradients(segments)
        targets = [replica.local[0] for replica, _ in stored]
        staging = [None] * len(segments) if self.offload is None else self.offload.staging(targets)
        return [
            FlatBuffer(segment, *stored[n], {kind: held[n] for kind, held in states.items()}, gradients[n], staging[n])
            for n, segment in enumerate(segments)
        ], exchange

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

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _gradients(self, segments: Sequence[ArenaSegment]) -> tuple[Sequence[FlatGradient], GradientExchange | None]:
        comm, options = self._comm, self._options
        held = [self._placements.gradient.segment(segment.layout, comm.rank) for segment in segments]
        # nothing is reduced, or in FP32: a sum over ranks is rounded where it is formed, at the owner
        is_accumulated = self.noise is None or all(s.layout.shard_numel == s.layout.numel for s in segments)
        is_accumulated &= not options.reproducible and all(own.numel == own.layout.numel for own in held)
        if is_accumulated and self.offload is None:
            fulls = self._main_grads(held, comm.allocate)
            return [self._accumulated(segment, full) for segment, full in zip(segments, fulls, strict=True)], None
        backward = sorted(segments, key=lambda segment: self.order.index(segment.layout.group))
        # the root group, last in backward, is opened early
        num_early = sum(segment.layout.group == self.order[-1] for segment in backward)
        exchange = comm.gradient_exchange([self._send(segment.layout) for segment in backward], num_early)
        offload = self.offload
        if offload is not None:
            main_grads = self._split(torch.zeros(sum(s.numel for s in segments)), segments)
            return [
                OffloadedGradient(
                    *(segment, comm, main_grad, exchange, backward.index(segment)),
                    RunningSum(segment.shard_of(main_grad, comm.rank)),
                    arrivals=offload.arrivals,
                )
                for segment, main_grad in zip(segments, main_grads, strict=True)
            ], exchange
        is_gathered = any(segment.numel == segment.layout.numel for segment in segments)
        # the other ranks read the main grads only in the all-gather of the sums
        allocate = comm.allocate if is_gathered else partial(torch.zeros, device=comm.device)
        if self._mesh.is_hybrid:  # the other replicas read them
            allocate = self._mesh.replicate.allocate
        main_grads = self._main_grads(segments, allocate)
        gradients = []
        for segment, main_grad in zip(segments, main_grads, strict=True):
            shard = segment.shard_of(main_grad, comm.rank)
            replicas = self._replica_sum(segment, shard)
            own = replicas if isinstance(replicas, TreeReplicaSum) else self._sum_of(segment, shard)
            gradients.append(ExchangedGradient(segment, comm, main_grad, exchange, backward.index(segment), own))
            gradients[-1].replicas = replicas
        return gradients, exchange

    def _replica_sum(self, segment: ArenaSegment, shard: Tensor) -> ReplicaSum | None:
        """Returns the sum of a main grad's ``shard`` over the replicas; None: there is one."""
        if not self._mesh.is_hybrid:
            return None
        replicate, label = self._mesh.replicate, across(segment.layout.name)
        if self._options.reproducible:
            return TreeReplicaSum(replicate, shard, label, self._subtrees)
        return RunningReplicaSum(replicate, shard, label)

    def _main_grads(self, held: Sequence[ArenaSegment], allocate: Callable[..., Tensor]) -> list[Tensor]:
        """Returns zeros for the main grads of ``held``; those of one dtype lie in one contiguous tensor."""
        dtypes = [self._main_grad_dtype(segment.layout) for segment in held]
        parts = {}
        for dtype in dict.fromkeys(dtypes):
            own = [segment for segment, other in zip(held, dtypes, strict=True) if other == dtype]
            parts[dtype] = iter(self._split(allocate(sum(segment.numel for segment in own), dtype=dtype), own))
        return [next(parts[dtype]) for dtype in dtypes]

    def _main_grad_dtype(self, layout: FlatLayout) -> torch.dtype:
        return main_grad_dtype(layout, self._contract, self._options)

    def _accumulated(self, segment: ArenaSegment, full: Tensor) -> FlatGradient:
        if full.dtype == torch.bfloat16:
            assert self.noise is not None
            return RoundedGradient(segment, self._comm, full, self.noise)
        gradient = AccumulatedGradient(segment, self._comm, full, self._send(segment.layout).dtype)
        gradient.replicas = self._replica_sum(segment, gradient.shard)
        return gradient

    def _sum_of(self, segment: ArenaSegment, shard: Tensor) -> GradientSum:
        """Returns the sum of ``shard``, this rank's shard of the main grad of ``segment``."""
        if self._options.reproducible:
            return TreeSum(shard)  # which rounds the sum of a step once
        if self.noise is not None and self._main_grad_dtype(segment.layout) == torch.bfloat16:
            origin = segment.layout.name, segment.layout.shard(self._comm.rank)[0]
            return RoundedSum(shard, origin=origin, noise=self.noise)
        return RunningSum(shard)

    def _send(self, layout: FlatLayout) -> GradientSend:
        dtype = self._contract.policy.dtype_during_reduction(grad_dtype(layout, self._contract))
        return GradientSend(layout.name, layout.numel, dtype, layout.extents)


def grad_dtype(layout: FlatLayout, contract: Contract) -> torch.dtype:
    """Returns the dtype in which the gradients of a flat buffer's parameters leave backward."""
    return contract.parameter_dtype(layout.slots[0].spec.name)


def main_grad_dtype(layout: FlatLayout, contract: Contract, options: Native) -> torch.dtype:
    """Returns the dtype of a flat buffer's main grad: BF16 if it is asked for and the gradients are BF16, else FP32."""
    is_bf16 = options.grad_dtype == "bf16" and grad_dtype(layout, contract) == torch.bfloat16
    return torch.bfloat16 if is_bf16 else torch.float32
