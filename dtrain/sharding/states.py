"""The model states of the native engine: those of a ``dtrain.sharding.model.ShardedModel``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dtrain.checkpoint.snapshot import TensorShard
from dtrain.config.engines import Native
from dtrain.errors import ContractError
from dtrain.optim.matrix import MatrixUpdate, storages
from dtrain.parameters.compute_shard import ComputeShard
from dtrain.parameters.model_states import MAIN_GRAD, MASTER, MOMENTS, ManagedModel, ModelStates
from dtrain.parameters.squares import sum_squares
from dtrain.precision.remainder import REMAINDER, Numbers, RemainderPair, read
from dtrain.sharding.build_gradients import main_grad_dtype
from dtrain.sharding.frozen_float8 import FROZEN, FrozenFloat8
from dtrain.sharding.group import FlatBuffer, tensor_shard
from dtrain.sharding.model import ShardedModel
from dtrain.sharding.placement import STAGES, memory_formula
from dtrain.sharding.replicas import slot_views

TRANSFER, STAGING = "transfer", "staging"
"""Kinds of the buffers of copies between the device and the host, on either, in ``ModelStates.memory``."""


class ShardedStates(ModelStates):
    """The states of ``sharded``, with the settings in ``options``.

    Attributes:
        sharded: the model's parameter groups.
        matrices: the updates that need whole matrices, by the number of their rule; set by the engine.
    """

    def __init__(self, managed: ManagedModel, options: Native, sharded: ShardedModel) -> None:
        super().__init__(managed, options.name, options.zero_stage)
        self.sharded = sharded
        self.matrices: Mapping[int, MatrixUpdate] = {}
        self._options = options

    # -- memory ------------------------------------------------------------------------------------------------------

    def held(self, kind: str) -> list[Tensor]:
        """Returns the masters that are not pairs, the main grads, or an optimizer state."""
        held = (buffer.held(kind).values for buffer in self.sharded.buffers)
        return [values for values in held if isinstance(values, Tensor)]

    @property
    def _pairs(self) -> list[RemainderPair]:
        """The masters of which the replica is a half."""
        return [buffer.master for buffer in self.sharded.buffers if isinstance(buffer.master, RemainderPair)]

    def _storages(self) -> dict[str, list[Tensor]]:
        sharded, exchange = self.sharded, self.sharded.reducer.exchange
        trained = [tensor for buffer in sharded.buffers for tensor in buffer.replica.persistent]
        frozen = [tensor for replica in sharded.frozen for tensor in replica.persistent]
        frozen += [tensor for weights in sharded.frozen_float8 for tensor in weights.tensors]
        return {
            MASTER: [*self.held(MASTER), *(pair.remainder for pair in self._pairs)],
            "compute": [*trained, *sharded.scales.tensors],
            "unsharded": [tensor for replica in sharded.replicas for tensor in replica.unsharded],
            MAIN_GRAD: [buffer.gradient.storage for buffer in sharded.buffers],
            "unreduced_grad": [] if exchange is None else exchange.idle(),
            "frozen": [*self.replicated_frozen().values(), *frozen],
            **storages(self.matrices),
            **({} if sharded.offload is None else {TRANSFER: sharded.offload.on_device}),
            **({} if sharded.offload is None else {STAGING: sharded.offload.on_host}),
        }

    @property
    def host_kinds(self) -> Collection[str]:
        return () if self.sharded.offload is None else (MASTER, MOMENTS, MAIN_GRAD, STAGING)

    def memory_formula(self) -> dict[str, int]:
        replicas = [(slot.spec.numel, buffer) for buffer in self.sharded.buffers for slot in buffer.layout.slots]
        placements = STAGES[self.zero_stage]
        if self.sharded.reducer.exchange is not None:  # to the owners of the masters, at stage 1 too
            placements = replace(placements, gradient=placements.master)
        return memory_formula(
            placements,
            numel=sum(numel for numel, _ in replicas),
            state_bytes=self.state_bytes,
            replica_bytes=sum(
                numel * len(buffer.replica.local) * buffer.layout.dtype.itemsize
                for numel, buffer in replicas
                if not buffer.replica.shares_master
            ),
            fp32_numel=sum(numel for numel, buffer in replicas if buffer.replica.shares_master),
            paired_numel=sum(numel for numel, buffer in replicas if isinstance(buffer.master, RemainderPair)),
            grad_bytes=sum(numel * self._main_grad_dtype(buffer).itemsize for numel, buffer in replicas),
            frozen_bytes=self.frozen_bytes,
            num_ranks=self.mesh.shard.world_size,
        )

    def _main_grad_dtype(self, buffer: FlatBuffer) -> torch.dtype:
        return main_grad_dtype(buffer.layout, self.contract, self._options)

    # -- masters, optimizer states and main grads --------------------------------------------------------------------

    def owned_shards(self, kind: str) -> Iterator[TensorShard]:
        for buffer in self.sharded.buffers:
            yield from buffer.owned_shards(kind, self.mesh.shard.rank)

    def local_shards(self, kind: str) -> Iterator[TensorShard]:
        for buffer in self.sharded.buffers:
            yield from buffer.local_shards(kind)

    def replicated_masters(self) -> Collection[str]:
        whole = (buffer.layout for buffer in self.sharded.buffers if buffer.segment.numel == buffer.layout.numel)
        return {slot.spec.name for layout in whole for slot in layout.slots}

    def full_state(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        for buffer in self.sharded.buffers:
            layout, segment, held = buffer.layout, buffer.segment, buffer.held(kind)
            slots = [slot for slot in layout.slots if self.plan.has_state(slot.spec.update_class, kind)]
            if not slots:
                continue
            # a copy, because the next backward may write a main grad before all ranks have read it
            values = read(held.values)
            full = torch.zeros(segment.numel, dtype=values.dtype, device=self.comm.device)
            full[held.start : held.start + values.numel()] = values
            if segment.numel < layout.numel:
                shard, full = full, full.new_zeros(layout.numel)
                self.mesh.shard.all_gather(full, shard, label=f"full {layout.name}").wait()
            for slot in slots:
                yield slot.spec.name, full[slot.start : slot.stop].view(slot.spec.shape)

    def squares(self) -> Tensor:
        """Returns the squares of this rank's shards, one for each chunk on a CPU and in reproducible runs."""
        is_reproducible = self._options.reproducible
        if self.mesh.replicate.rank and not is_reproducible:  # the first replica counts for all
            return torch.zeros(1, dtype=torch.float64, device=self.comm.device)
        if self.sharded.state_device.type == "cpu" or is_reproducible:
            return self.sharded.chunk_squares(each=is_reproducible and self.sharded.offload is None)
        return sum_squares([buffer.gradient.shard for buffer in self.sharded.buffers])

    # -- compute weights ---------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        self.sharded.refresh()
        self.await_readers()

    def compute_shards(self) -> Iterator[ComputeShard]:
        return self._compute_shards(by_owner=True)

    def whole_compute_shards(self) -> Iterator[ComputeShard]:
        return self._compute_shards(by_owner=False)

    def _compute_shards(self, *, by_owner: bool) -> Iterator[ComputeShard]:
        scales = self.sharded.scales
        for buffer in self.sharded.buffers:
            sources: Sequence[Numbers] = [buffer.master]
            if buffer.replica.is_float8:
                sources = scales.cast_again(buffer.segment, read(buffer.master))
            yield from buffer.compute_shards(self.mesh.shard.rank, sources, by_owner=by_owner)
        for name, scale, expected in scales.by_weight():
            yield ComputeShard(name, "FP8 scale", 0, scale, self.mesh.shard.rank, expected, is_gathered=False)

    def open_weights(self, names: Collection[str]) -> None:
        self.sharded.open_weights(names)

    def unreachable_parameters(self) -> Collection[str]:
        """Returns those that are sharded, and those whose replica is FP8: both are placeholders."""
        replicas = (replica for replica in self.sharded.replicas if replica.is_sharded or replica.is_float8)
        return {name for replica in replicas for name in replica.views.parameters}

    def unshared_parameters(self) -> Collection[str]:
        replicas = [(group.name, replica) for group in self.sharded.groups for replica in group.replicas]
        bound = (replica for unit, replica in replicas if replica.is_float8 or (unit and replica.is_sharded))
        return {name for replica in bound for name in replica.views.parameters}

    def await_readers(self) -> None:
        if self.comm.device.type == "cpu" and any(buffer.replica.is_gathered for buffer in self.sharded.buffers):
            self.comm.barrier()

    # -- frozen parameters -------------------------------------------------------------------------------------------

    def frozen_shards(self) -> Iterator[TensorShard]:
        for replica in self.sharded.frozen:
            if not replica.is_float8:
                for interval in replica.layout.intervals(*replica.layout.shard(self.mesh.shard.rank)):
                    yield tensor_shard(FROZEN, interval, replica.local[0])

    @property
    def frozen_float8(self) -> Sequence[FrozenFloat8]:
        return self.sharded.frozen_float8

    def replicated_frozen(self) -> dict[str, Tensor]:
        sharded = {name for replica in self.sharded.frozen for name in replica.views.parameters}
        return {name: p for name, p in super().replicated_frozen().items() if name not in sharded}

    def full_frozen(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().full_frozen()
        for frozen in self.frozen_float8:
            yield from frozen.full()
        for replica in (replica for replica in self.sharded.frozen if not replica.is_float8):
            layout, shard = replica.layout, replica.local[0]
            full = shard.new_empty(layout.numel)
            self.mesh.shard.all_gather(full, shard, label=f"full {layout.name}").wait()
            yield from zip(replica.views.parameters, slot_views(full, layout), strict=True)

    def take_frozen(self, values: Mapping[str, Tensor]) -> None:
        super().take_frozen(values)
        for frozen in self.frozen_float8:
            if not values.keys().isdisjoint(frozen.names):
                held = frozen.values()  # casting what is not in `values` again changes no weight
                for shard in frozen.shards(held):
                    if shard.name in values:
                        shard.write(values[shard.name].reshape(-1)[shard.start : shard.stop])
                frozen.write(held)

    # -- the contract ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        self.mesh.check(self.comm.world_size // (self._options.shard_size or self.comm.world_size))
        self.check_formats()
        for buffer in self.sharded.buffers:
            expected, found = self._main_grad_dtype(buffer), buffer.gradient.storage.dtype
            if found != expected:
                raise ContractError(f"main_grad is {found}; the contract says {str(expected).removeprefix('torch.')}")
        for pair in self._pairs:
            if (pair.weight.dtype, pair.remainder.dtype) != (torch.bfloat16, REMAINDER):
                raise ContractError(
                    f"a master is held as {pair.weight.dtype} and {pair.remainder.dtype}; the contract says bfloat16 "
                    f"and {REMAINDER}"
                )

    def check_step(self) -> None:
        for replica in self.sharded.replicas:
            replica.views.check()
        super().check_step()
