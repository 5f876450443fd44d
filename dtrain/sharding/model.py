"""A model whose states are sharded: its parameter groups in order, their gradients, and the refresh after an update."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from dtrain.distributed.mesh import Mesh
from dtrain.optim.flat import BLOCK
from dtrain.parameters.squares import chunk_squares
from dtrain.precision.float8.cast import E4M3
from dtrain.sharding.float8_scales import Float8Scales
from dtrain.sharding.frozen_float8 import FrozenFloat8
from dtrain.sharding.group import ParameterGroup
from dtrain.sharding.layout import CHUNK, FlatLayout
from dtrain.sharding.offload import HOST, Offload
from dtrain.sharding.reduce import GradientReducer
from dtrain.sharding.replicas import Replica
from dtrain.sharding.unshard import UnshardScheduler

_GATHER_BUCKETS = 4
"""Calls of the update on a GPU if replicas are gathered after it: the gathers of one overlap with the next update."""


class ShardedModel:
    """The parameter groups of a model on this rank; ``dtrain.sharding.build.build`` makes it.

    Args:
        groups: in the order of definition, the root group first.
        reducer: reduces the gradients of the groups.
        scales: scales of the FP8 replicas.
        scheduler: unshards and reshards the groups; None: all replicas are whole.
        mesh: the ranks.
        frozen_float8: the frozen weights that are held in FP8.
        offload: the masters, states and main grads are on the host; None: where the replicas are.

    Attributes:
        groups, reducer, scales, scheduler, frozen_float8, offload: see above.
        state_device: where masters, states and main grads lie.
        buffers: the trained flat buffers of all groups, in their order.
        replicas: of all groups, also those of frozen parameters.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        reducer: GradientReducer,
        scales: Float8Scales,
        scheduler: UnshardScheduler | None,
        mesh: Mesh,
        frozen_float8: Sequence[FrozenFloat8] = (),
        offload: Offload | None = None,
    ) -> None:
        self.groups = groups
        self.buffers = [buffer for group in groups for buffer in group.buffers]
        self.replicas = [replica for group in groups for replica in group.replicas]
        self.reducer = reducer
        self.scheduler = scheduler
        self.scales = scales
        self.frozen_float8 = frozen_float8
        self.offload = offload
        self.state_device = mesh.shard.device if offload is None else HOST
        self._comm = mesh.shard
        self._replicate = mesh.replicate
        self._float8 = [number for number, buffer in enumerate(self.buffers) if buffer.layout.dtype == E4M3]
        self._buckets = self._update_buckets()
        for group in groups:
            group.install_hooks(self)
        self.refresh()

    # -- gradients ---------------------------------------------------------------------------------------------------

    def gradients_taken(self, group: ParameterGroup, grads: Sequence[tuple[int, Tensor]]) -> None:
        self.reducer.receive(group, grads)
        if self.scheduler is not None:
            self.scheduler.gradients_taken(group)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of one micro-batch's backward; gradients outside it are not taken."""
        with self.scheduler.backward() if self.scheduler is not None else nullcontext():
            for group in self.groups:
                group.takes_gradients = True
            try:
                yield
            finally:
                for group in self.groups:
                    group.takes_gradients = False

    # -- the update --------------------------------------------------------------------------------------------------

    def _update_buckets(self) -> list[list[int]]:
        """Returns the numbers of the buffers that are not FP8, in forward order, by the call of the update.

        On a CPU a call has as many as make ``BLOCK`` elements, whose masters are in the cache when they are cast.
        On a GPU a call is a launch: one for all buffers, or, if they are gathered after it, a few, so that gathers
        start early.
        """
        numbers = [number for number in range(len(self.buffers)) if number not in self._float8]
        if self.offload is not None:  # replicas share their staging buffers
            return [[number] for number in numbers]
        if self.state_device.type == "cpu":
            limit: float = BLOCK
        else:
            is_gathered = any(buffer.replica.is_gathered for buffer in self.buffers)
            limit = sum(buffer.segment.numel for buffer in self.buffers) / (_GATHER_BUCKETS if is_gathered else 1)
        buckets: list[list[int]] = []
        filled = math.inf
        for number in numbers:
            if filled >= limit:
                buckets.append([])
                filled = 0
            buckets[-1].append(number)
            filled += self.buffers[number].segment.numel
        return buckets

    def refresh(self, update: Callable[[Sequence[int]], None] | None = None) -> None:
        """Casts the masters into the compute replicas, and all-gathers sharded results; all ranks call.

        The cast of FP8 weights needs the largest magnitudes over all ranks, which are reduced while the other buffers
        are updated.

        Args:
            update: updates the masters and replicas of the buffers with given numbers, so that the first groups are
                gathered while others are still updated; None casts the masters as they are.
        """
        if self.scheduler is not None:  # what is unsharded now would keep the old values
            self.scheduler.reshard()
        update = self._staged(update or self._cast_masters)
        if self._float8:
            update(self._float8)
            self.scales.measure()
        handles = []
        for numbers in self._buckets:
            update(numbers)
            for number in numbers:
                handles += self.buffers[number].replica.start_gather()
        if self._float8:
            self.scales.cast()
            for number in self._float8:
                handles += self.buffers[number].replica.start_gather()
        for handle in handles:  # before the next vote: [Note: buffer reuse]
            handle.wait()
        for buffer in self.buffers:  # after the waits: operands are made from gathered values
            buffer.replica.views.invalidate()
        if self.scheduler is not None:  # all all-gathers until the next update read these
            self._comm.publish([local for replica in self.replicas for local in replica.local])

    def open_weights(self, names: Collection[str]) -> None:
        """Lets the parameters called ``names`` be read and written, which the caller makes whole; no names end it."""
        if self.scheduler is not None:
            self.scheduler.open_weights(names)
        for replica in self.replicas:
            if names:
                replica.views.open_weights(names)
            elif not replica.is_sharded:
                replica.bind()

    def _staged(self, update: Callable[[Sequence[int]], None]) -> Callable[[Sequence[int]], None]:
        """Returns ``update``, followed by the copy of what it has cast to the device, if that is on the host."""
        if self.offload is None:
            return update

        def staged(numbers: Sequence[int]) -> None:
            staging = [(self.buffers[number].staging, self.buffers[number].replica) for number in numbers]
            for buffer, _ in staging:
                assert buffer is not None
                buffer.begin()
            update(numbers)
            for buffer, replica in staging:
                assert buffer is not None
                buffer.send(replica.local[0])

        return staged

    def _cast_masters(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.buffers[number].cast_master()

    # -- the norm ----------------------------------------------------------------------------------------------------

    def chunk_squares(self, *, each: bool) -> Tensor:
        """Returns FP64 [chunks of this rank], the sums of squares of the main grads' chunks.

        Args:
            each: whether each of them counts, not only their sum.
        """
        gradients = [buffer.gradient for buffer in self.buffers]
        is_cpu = self.state_device.type == "cpu"
        return chunk_squares([g.chunks for g in gradients], [g.norms for g in gradients] if is_cpu else None, each=each)

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

    def canonical_weights(self) -> Tensor:
        """Returns the weights of the step's micro-batches in the order of their global index."""
        rows = self._replicate.gather_rows(torch.cat(self.reducer.step.weights), label="weights")
        # [replica, micro-batch, rank of the replica]
        return rows.view(self._replicate.world_size, -1, self._comm.world_size).transpose(0, 1).reshape(-1)

    @property
    def layouts(self) -> list[FlatLayout]:
        """Layouts of the trained flat buffers."""
        return [buffer.layout for buffer in self.buffers]

    @property
    def frozen(self) -> list[Replica]:
        """Replicas of the frozen parameters that are sharded or FP8."""
        return [replica for replica in self.replicas if not replica.layout.is_trained]
