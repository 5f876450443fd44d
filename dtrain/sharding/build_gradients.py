"""Builds the gradients of a model's flat buffers, as ``dtrain.sharding.placement.GRADIENTS`` chooses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dtrain.config.engines import Native
from dtrain.distributed.communicator import GradientExchange, GradientSend
from dtrain.distributed.mesh import Mesh
from dtrain.precision.contract import Contract
from dtrain.sharding.accumulate import GradientSum, RunningSum, TreeSum
from dtrain.sharding.gradients import ExchangedSending, FlatGradient, LocalSending
from dtrain.sharding.group import ParameterGroup
from dtrain.sharding.layout import ArenaSegment, FlatLayout
from dtrain.sharding.offload import HOST, HostSum, Offload
from dtrain.sharding.placement import Join, Placement, Send, Sum, gradient_kind
from dtrain.sharding.reduce import GradientReducer
from dtrain.sharding.replica_sum import ReplicaSum, RunningReplicaSum, SubtreesInFlight, TreeReplicaSum, across
from dtrain.sharding.rounded_gradients import RoundedSum, StepNoise


class GradientBuilder:
    """Makes main grads, and what sends and sums them: [Note: construction order].

    Args:
        contract, mesh, options: as of ``dtrain.sharding.build.build``.
        order: names of the groups with trained parameters, in the order in which backward is expected to reach them.
        offload: main grads are on the host; None: on the rank's device.
    """

    def __init__(
        self, contract: Contract, mesh: Mesh, options: Native, order: Sequence[str], offload: Offload | None
    ) -> None:
        self._contract = contract
        self._options = options
        self._comm, self._replicate = mesh.shard, mesh.replicate
        self._order = order
        self._offload = offload
        self._kind = gradient_kind(options, mesh, is_offloaded=offload is not None)
        self._noise = StepNoise(mesh.shard.device) if self._kind.sum is Sum.ROUNDED else None
        self._subtrees = SubtreesInFlight()
        self._exchange: GradientExchange | None = None

    def build(self, segments: Sequence[ArenaSegment]) -> list[FlatGradient]:
        """Returns the gradients of ``segments``, the masters of each flat buffer on this rank; once, all ranks call."""
        backward = sorted(segments, key=lambda segment: self._order.index(segment.layout.group))
        held = segments
        if self._kind.send is Send.LOCAL:
            held = [Placement.REPLICATE.segment(segment.layout, self._comm.rank) for segment in segments]
        else:
            # the root group, last in backward, is opened early
            num_early = sum(segment.layout.group == self._order[-1] for segment in backward)
            sends = [self._send(segment.layout) for segment in backward]
            self._exchange = self._comm.gradient_exchange(sends, num_early)
        storages = self._main_grads(held)
        return [
            self._gradient(segment, storage, own.shard_of(storage, self._comm.rank), backward.index(segment))
            for segment, own, storage in zip(segments, held, storages, strict=True)
        ]

    def reducer(self, groups: Sequence[ParameterGroup]) -> GradientReducer:
        """Returns what reduces the gradients of ``groups``, which were built."""
        trained = sorted((one for one in groups if one.buffers), key=lambda one: self._order.index(one.name))
        # on a CPU the rank itself would wait; a tree has exchanged its sums before
        overlaps = self._kind.join is Join.AT_END and not self._comm.device_is_host
        return GradientReducer(trained, self._exchange, self._noise, completes_early=overlaps)

    def _main_grads(self, held: Sequence[ArenaSegment]) -> list[Tensor]:
        """Returns zeros for the main grads of ``held``; those of one dtype lie in one contiguous tensor."""
        allocate = self._allocator(held)
        dtypes = [main_grad_dtype(segment.layout, self._contract, self._options) for segment in held]
        parts = {}
        for dtype in dict.fromkeys(dtypes):
            numels = [segment.numel for segment, other in zip(held, dtypes, strict=True) if other == dtype]
            parts[dtype] = iter(torch.split(allocate(sum(numels), dtype=dtype), numels))
        return [next(parts[dtype]) for dtype in dtypes]

    def _allocator(self, held: Sequence[ArenaSegment]) -> Callable[..., Tensor]:
        kind, comm = self._kind, self._comm
        if kind.sum is Sum.HOST:
            return partial(torch.zeros, device=HOST)
        if kind.send is Send.EXCHANGED and kind.join is not Join.NONE:  # the other replicas read them
            return self._replicate.allocate
        # the other ranks read what each accumulates; else they read only what is gathered
        is_read = kind.send is Send.LOCAL or any(segment.numel == segment.layout.numel for segment in held)
        return comm.allocate if is_read else partial(torch.zeros, device=comm.device)

    def _gradient(self, segment: ArenaSegment, storage: Tensor, shard: Tensor, index: int) -> FlatGradient:
        """Returns the gradient of ``segment``, whose ``shard`` this rank sums, send ``index`` of the exchange."""
        layout, replicas = segment.layout, self._replicas(segment.layout, shard)
        if self._exchange is not None:
            total = replicas if isinstance(replicas, TreeReplicaSum) else self._total(layout, shard)
            exchanged = ExchangedSending(layout, self._exchange, index)
            return FlatGradient(segment, self._comm, storage, exchanged, total, replicas)
        sums = None
        if self._noise is not None and storage.dtype == torch.bfloat16:
            noise, slots = self._noise, layout.slots
            sums = [RoundedSum(storage[s.start : s.stop], (layout.name, s.start), noise).accumulate for s in slots]
        local = LocalSending(segment, self._comm, storage, self._send(layout).dtype, sums)
        return FlatGradient(segment, self._comm, storage, local, None, replicas)

    def _replicas(self, layout: FlatLayout, shard: Tensor) -> ReplicaSum | None:
        if self._kind.join is Join.NONE:
            return None
        if self._kind.join is Join.AT_END:
            return RunningReplicaSum(self._replicate, shard, across(layout.name))
        return TreeReplicaSum(self._replicate, shard, across(layout.name), self._subtrees)

    def _total(self, layout: FlatLayout, shard: Tensor) -> GradientSum:
        if self._offload is not None:
            return HostSum(shard, self._offload.arrivals)
        if self._kind.sum is Sum.TREE:
            return TreeSum(shard)  # which rounds the sum of a step once
        if self._noise is not None and shard.dtype == torch.bfloat16:
            return RoundedSum(shard, (layout.name, layout.shard(self._comm.rank)[0]), self._noise)
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
