"""dtrain's own engine: sharded FP32 masters, reductions that overlap backward, one vote a step, one update."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dtrain.checkpoint.snapshot import TensorShard
from dtrain.config.engines import Native
from dtrain.distributed.consensus import on_every_rank
from dtrain.engine.interface import Engine
from dtrain.engine.model_state import MAIN_GRAD, MASTER, MOMENTS
from dtrain.engine.observation import ReduceDtypeCheck
from dtrain.engine.request import EngineRequest
from dtrain.engine.step import StepEngine
from dtrain.engine.vote.record import upload
from dtrain.errors import ConfigError, ContractError
from dtrain.optim.average import MovingAverage
from dtrain.optim.flat import FlatUpdate
from dtrain.optim.matrix import HeldMatrix, matrix_updates, storages
from dtrain.optim.rule import SegmentKernel, UpdateScalars
from dtrain.parameters.compute_shard import ComputeShard
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.parameters.squares import sum_squares
from dtrain.precision.remainder import REMAINDER, Numbers, RemainderPair, read
from dtrain.sharding.build import build as build_sharded
from dtrain.sharding.build_gradients import grad_dtype, main_grad_dtype
from dtrain.sharding.frozen_float8 import FROZEN, FrozenFloat8
from dtrain.sharding.group import FlatBuffer, tensor_shard
from dtrain.sharding.layout import CHUNK
from dtrain.sharding.model import ShardedModel
from dtrain.sharding.placement import STAGES, memory_formula
from dtrain.sharding.quantized_replicas import Float8Views
from dtrain.sharding.replica_sum import across
from dtrain.sharding.replicas import slot_views

if TYPE_CHECKING:
    from dtrain.kernels.squares import SquareSums


TRANSFER, STAGING = "transfer", "staging"
"""Kinds of the buffers of copies between the device and the host, on either, in :meth:`Engine.memory`."""


def build(request: EngineRequest) -> Engine:
    """Builds the engine; the model's trainable parameters become views of its compute replicas."""
    options = request.step.engine
    assert isinstance(options, Native)
    contract, names = request.contract, request.plan.numbers
    # such as with precision=auto on an older GPU
    if options.master == "remainder" and torch.bfloat16 not in {contract.replica_dtypes[name] for name in names}:
        raise ConfigError(
            f"master=remainder with precision={contract.policy.name}: no trained parameter has a BF16 weight, so none "
            f"can be a half of its FP32 master; use precision=bf16, or master=full"
        )
    if options.grad_dtype == "bf16" and torch.bfloat16 not in {contract.parameter_dtype(name) for name in names}:
        raise ConfigError(
            f"grad_dtype=bf16 with precision={contract.policy.name}: no trained parameter has BF16 gradients, and "
            f"others would be rounded; use precision=bf16, or grad_dtype=fp32"
        )
    return NativeEngine(request, build_sharded(request.model, request.contract, request.mesh, options, request.plan))


class NativeEngine(StepEngine):
    """The step of :class:`dtrain.engine.step.StepEngine` over :class:`dtrain.sharding.model.ShardedModel`.

    Args:
        request: model, contract, communicator and options from ``initialize``.
        sharded: the model's parameter groups; its parameters are views of their replicas.
    """

    name = "native"
    searches_backward = True

    def __init__(self, request: EngineRequest, sharded: ShardedModel) -> None:
        backward_names = [name for group in sharded.reducer.groups for name in group.trained]
        super().__init__(request, backward_names, sharded.reducer.monitor)
        self.sharded = sharded
        for views in (replica.views for replica in sharded.replicas):
            if isinstance(views, Float8Views):
                views.attach(self.module)
        self.forward_communicates = sharded.scheduler is not None
        self._reduce_dtype_check: ReduceDtypeCheck | None = None  # until the first step is reduced
        self._square_sums: SquareSums | None = None
        self._build_optimizer()
        self.check_contract()
        self.await_readers()

    def _held_matrices(self, rule: int) -> list[list[HeldMatrix]]:
        """Returns what each rank holds of the parameters that rule number ``rule`` updates."""
        return [
            [
                (interval.spec.name, interval.spec.shape, interval.start, interval.stop)
                for buffer in self.sharded.buffers
                for interval in buffer.segment.of_rank(rank).intervals()
                if self.plan.classes[interval.spec.update_class].rule == rule
            ]
            for rank in range(self.mesh.shard.world_size)
        ]

    def _build_optimizer(self) -> None:
        # before anything that may fail on a single rank, because it communicates
        shards = [list(buffer.matrix_shards(self.plan)) for buffer in self.sharded.buffers]
        self._matrices = matrix_updates(self.plan.rules, shards, self.mesh.shard, self._held_matrices)

        def build() -> None:
            slices = [buffer.update_slices(self.plan) for buffer in self.sharded.buffers]
            self._optimizer = FlatUpdate(self.plan.rules, slices, self._matrices, self._build_average())
            if self.plan.is_compiled and self.sharded.state_device.type == "cuda":
                from dtrain.engine.vote.fused import fused_vote  # it imports Triton, which only GPUs need

                grads = [buffer.gradient.shard for buffer in self.sharded.buffers]
                self._square_sums, self._vote_tensors = fused_vote(grads, CHUNK, self.options, self.comm)
                self.monitor.found = self._vote_tensors.bad_gradient

        # a compiler may fail on a single rank
        on_every_rank(self.comm, "", build, ConfigError, expected=(ConfigError,))

    def _build_average(self) -> SegmentKernel | None:
        decay = self.plan.ema_decay
        if decay is None:
            return None
        averaged = [buffer.averaged() for buffer in self.sharded.buffers]
        plain = [[(master, average)] for master, average in averaged if isinstance(master, Tensor)]
        on_gpu = self.sharded.state_device.type == "cuda"
        if self.plan.is_compiled and on_gpu and len(plain) == len(averaged):  # the kernel reads no pairs
            from dtrain.optim.tiled_average import TiledAverage  # it imports Triton, which only GPUs need

            return TiledAverage(decay, plain)
        return MovingAverage(decay, [[pair] for pair in averaged])

    def _forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.module(*args, **kwargs)

    def _backward(self, loss: Tensor, weight: Weight) -> None:
        reducer = self.sharded.reducer
        # before backward, so that the weights are sent while it runs
        step = self.attempted_steps + 1
        reducer.begin_micro_batch(weight, number=self._micro_batch, last=self._is_last, step=step)
        if loss.requires_grad:  # else this rank's gradients are zero, and it reduces with the others all the same
            with self.sharded.backward():
                (loss * self.loss_scale.scale).backward()
        reducer.end_micro_batch()

    def discard_forward(self) -> None:
        if self.sharded.scheduler is not None:
            self.sharded.scheduler.reshard()

    def finish_gradients(self) -> None:
        self.sharded.reducer.finish()
        if self._reduce_dtype_check is not None:  # in the first step only: later ones reduce the same tensors
            self._reduce_dtype_check.require_complete()
            self._reduce_dtype_check = self.comm.schedule.on_reduction = None

    def _squares(self) -> Tensor:
        if self.mesh.replicate.rank and not self.options.reproducible:  # the first replica counts for all
            return torch.zeros(1, dtype=torch.float64, device=self.device)
        if self._square_sums is not None:
            return self._square_sums.compute()
        if self.sharded.offload is not None:
            total = self.sharded.chunk_squares(each=False).sum().view(1)
            return upload(total.view(torch.int64).tolist(), self.device).view(torch.float64)
        if self.device.type == "cpu" or self.options.reproducible:
            return self.sharded.chunk_squares(each=self.options.reproducible)
        return sum_squares([buffer.gradient.shard for buffer in self.sharded.buffers])

    def _canonical_sums(self, squares: Tensor) -> dict[str, Tensor]:
        if not self.options.reproducible:
            return {}
        return {
            "sum_squares": self.sharded.canonical_sum(squares),
            # the same weights in the same order at every world size
            "sum_weights": self.sharded.canonical_weights().double().sum(),
        }

    def _update(self, scalars: UpdateScalars) -> None:
        if self.sharded.offload is not None:
            scalars = self.sharded.offload.scalars(scalars)
        self._optimizer.begin(scalars)
        self.sharded.refresh(lambda numbers: self._optimizer.update(numbers, scalars))

    def _refresh(self) -> None:
        self.sharded.refresh()
        self.await_readers()

    def _clear_gradients(self) -> None:
        pass  # the first gradients of a step overwrite the last step's

    def _check_live(self) -> None:
        assert isinstance(self.options.engine, Native)
        self.mesh.check(self.world_size // (self.options.engine.shard_size or self.world_size))
        if self.comm.process_group is not None:  # else nothing is sent
            during = self.policy.dtype_during_reduction
            dtypes = {layout.name: during(grad_dtype(layout, self.contract)) for layout in self.sharded.layouts}
            if self.mesh.is_hybrid:  # whose sums over the replicas are proven to take place, and in FP32
                dtypes |= {across(layout.name): torch.float32 for layout in self.sharded.layouts}
            self._reduce_dtype_check = ReduceDtypeCheck(self.policy, dtypes)
            self.comm.schedule.on_reduction = self._reduce_dtype_check.record
        self.contract.check_parameters(self.module)
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

    def _main_grad_dtype(self, buffer: FlatBuffer) -> torch.dtype:
        assert isinstance(self.options.engine, Native)
        return main_grad_dtype(buffer.layout, self.contract, self.options.engine)

    def _check_step(self) -> None:
        for replica in self.sharded.replicas:
            replica.views.check()
        super()._check_step()

    def owned_shards(self, kind: str) -> Iterator[TensorShard]:
        for buffer in self.sharded.buffers:
            yield from buffer.owned_shards(kind, self.mesh.shard.rank)

    def local_shards(self, kind: str) -> Iterator[TensorShard]:
        for buffer in self.sharded.buffers:
            yield from buffer.local_shards(kind)

    def replicated_masters(self) -> Collection[str]:
        whole = (buffer.layout for buffer in self.sharded.buffers if buffer.segment.numel == buffer.layout.numel)
        return {slot.spec.name for layout in whole for slot in layout.slots}

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

    def full_state(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        for buffer in self.sharded.buffers:
            layout, segment, held = buffer.layout, buffer.segment, buffer.held(kind)
            slots = [slot for slot in layout.slots if self.plan.has_state(slot.spec.update_class, kind)]
            if not slots:
                continue
            # a copy, because the next backward may write a main grad before all ranks have read it
            values = read(held.values)
            full = torch.zeros(segment.numel, dtype=values.dtype, device=self.device)
            full[held.start : held.start + values.numel()] = values
            if segment.numel < layout.numel:
                shard, full = full, full.new_zeros(layout.numel)
                self.mesh.shard.all_gather(full, shard, label=f"full {layout.name}").wait()
            for slot in slots:
                yield slot.spec.name, full[slot.start : slot.stop].view(slot.spec.shape)

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

    def open_weights(self, names: Collection[str]) -> None:
        self.sharded.open_weights(names)

    def unreachable_parameters(self) -> Collection[str]:
        """Returns those that are sharded, and those whose replica is FP8: both are placeholders."""
        replicas = (replica for replica in self.sharded.replicas if replica.is_sharded or replica.is_float8)
        return {name for replica in replicas for name in replica.views.parameters}

    def await_readers(self) -> None:
        if self.device.type == "cpu" and any(buffer.replica.is_gathered for buffer in self.sharded.buffers):
            self.comm.barrier()

    def _held(self, kind: str) -> list[Tensor]:
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
            MASTER: [*self._held(MASTER), *(pair.remainder for pair in self._pairs)],
            "compute": [*trained, *sharded.scales.tensors],
            "unsharded": [tensor for replica in sharded.replicas for tensor in replica.unsharded],
            MAIN_GRAD: [buffer.gradient.storage for buffer in sharded.buffers],
            "unreduced_grad": [] if exchange is None else exchange.idle(),
            "frozen": [*self.replicated_frozen().values(), *frozen],
            **storages(self._matrices),
            **({} if sharded.offload is None else {TRANSFER: sharded.offload.on_device}),
            **({} if sharded.offload is None else {STAGING: sharded.offload.on_host}),
        }

    @property
    def host_kinds(self) -> Collection[str]:
        return () if self.sharded.offload is None else (MASTER, MOMENTS, MAIN_GRAD, STAGING)

    def memory_formula(self) -> dict[str, int]:
        replicas = [(slot.spec.numel, buffer) for buffer in self.sharded.buffers for slot in buffer.layout.slots]
        placements = STAGES[self.options.zero_stage]
        if self.sharded.offload is not None:  # every micro-batch is reduced, at stage 1 too
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
