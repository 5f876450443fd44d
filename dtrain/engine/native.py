"""dtrain's own engine: sharded FP32 masters, reductions that overlap backward, one vote a step, one update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dtrain.checkpoint.snapshot import TensorShard
from dtrain.distributed.consensus import on_every_rank
from dtrain.engine.interface import Engine
from dtrain.engine.model_state import MAIN_GRAD, MASTER
from dtrain.engine.observation import ReduceDtypeCheck
from dtrain.engine.request import EngineRequest
from dtrain.engine.step import StepEngine
from dtrain.engine.vote.record import NUM_FIELDS
from dtrain.errors import ConfigError, ContractError
from dtrain.optim.adamw import UpdateScalars
from dtrain.optim.flat import FlatAdamW
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.sharding.layout import CHUNK, ShardInterval
from dtrain.sharding.placement import STAGES, memory_formula
from dtrain.sharding.state import ShardedState

if TYPE_CHECKING:
    from dtrain.kernels.squares import SquareSums


def build(request: EngineRequest) -> Engine:
    """Builds the engine; the model's trainable parameters become views of its compute replicas."""
    options = request.engine
    state = ShardedState(
        request.model,
        request.contract,
        STAGES[request.step.zero_stage],
        request.comm,
        groups=options.groups,
        reproducible=request.step.reproducible,
        all_reduce=options.grad_reduction == "all_reduce",
        unshard=options.unshard,
        peak_lr=request.step.optimizer.lr,
    )
    return NativeEngine(request, state)


class NativeEngine(StepEngine):
    """The step of :class:`dtrain.engine.step.StepEngine` over :class:`dtrain.sharding.state.ShardedState`.

    Args:
        request: model, contract, communicator and options from ``initialize``.
        state: the model states; the model's parameters are views of its replicas.
    """

    name = "native"

    def __init__(self, request: EngineRequest, state: ShardedState) -> None:
        super().__init__(request, state.backward_names, state.monitor)
        self.state = state
        state.attach(self.module)
        self.forward_communicates = state.unshard_scheduler is not None
        self._reduce_dtype_check: ReduceDtypeCheck | None = None  # until the first step is reduced
        self._square_sums: SquareSums | None = None
        self._build_optimizer()
        self.check_contract()

    def _build_optimizer(self) -> None:
        def build() -> None:
            self._optimizer = FlatAdamW(self.options.optimizer, self.state.update_slices())
            if self.options.optimizer.compile and self.device.type == "cuda":
                self._fuse_vote()

        # a compiler may fail on a single rank
        on_every_rank(self.comm, "", build, ConfigError, expected=(ConfigError,))

    def _fuse_vote(self) -> None:
        """Lets Triton kernels compute the norm and the vote, a launch each."""
        from dtrain.engine.vote.fused import FusedVoteTensors
        from dtrain.kernels.squares import SquareSums
        from dtrain.optim.tiled import build_error

        grads = [grad for _, grad in self.state.owned_main_grads()]
        self._square_sums = SquareSums(grads, CHUNK, by_chunk=self.options.reproducible)
        self._vote_tensors = FusedVoteTensors(self.options.max_grad_norm, self.device)
        self.monitor.found = self._vote_tensors.bad_gradient
        try:  # compiled now, because in a step a failure of one rank would leave the others waiting
            self._square_sums.compute()
            self._vote_tensors.decide(torch.zeros(self.world_size, NUM_FIELDS, dtype=torch.int64, device=self.device))
        except Exception as error:
            raise build_error(error, self.device) from error

    def _forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.module(*args, **kwargs)

    def _backward(self, loss: Tensor, weight: Weight) -> None:
        state = self.state
        state.weight = weight
        # before backward, so that the all-gather of the weights overlaps with it
        state.reducer.begin_micro_batch(weight, number=self._micro_batch, last=self._is_last)
        if loss.requires_grad:  # else this rank's gradients are zero, and it reduces with the others all the same
            with state.backward():
                (loss * self.loss_scale.scale).backward()
        state.reducer.end_micro_batch()

    def finish_gradients(self) -> None:
        self.state.reducer.finish()
        if self._reduce_dtype_check is not None:  # in the first step only: later ones reduce the same tensors
            self._reduce_dtype_check.require_complete()
            self._reduce_dtype_check = self.comm.on_reduction = None

    def _squares(self) -> Tensor:
        return self.state.chunk_squares() if self._square_sums is None else self._square_sums.compute()

    def _canonical_sums(self, squares: Tensor) -> dict[str, Tensor]:
        if not self.options.reproducible:
            return {}
        return {
            "sum_squares": self.state.canonical_sum(squares),
            # the same weights in the same order at every world size
            "sum_weights": torch.cat(self.state.reducer.micro_batch_weights).double().sum(),
        }

    def _update(self, scalars: UpdateScalars) -> None:
        self.state.refresh_replicas(lambda numbers: self._optimizer.update(numbers, scalars), scalars.found_inf)
        self.state.reducer.micro_batch_weights.clear()

    def _refresh(self) -> None:
        self.state.refresh_replicas()

    def _clear_gradients(self) -> None:
        pass  # the first gradients of a step overwrite the last step's

    def _check_live(self) -> None:
        # a single rank reduces nothing
        if self.world_size > 1:
            dtypes = {layout.name: self.state.grad_dtype(layout) for layout in self.state.layouts}
            self._reduce_dtype_check = ReduceDtypeCheck(self.policy, dtypes)
            self.comm.on_reduction = self._reduce_dtype_check.record
        self.contract.check_parameters(self.module)
        for tensor in self.state.storages()[MAIN_GRAD]:
            if tensor.dtype != torch.float32:
                raise ContractError(f"main_grad is {tensor.dtype}; the contract says float32")

    def _check_step(self) -> None:
        for replica in self.state.replicas:
            replica.views.check()
        super()._check_step()

    def saved_state(self) -> dict[str, Any]:
        scales = self.state.scales.saved()
        return {} if scales is None else {"float8": scales}

    def restore_state(self, saved: Mapping[str, Any]) -> None:
        self.state.scales.restore(saved.get("float8"))

    def owned_shards(self, kind: str) -> Iterator[TensorShard]:
        if kind == MAIN_GRAD:
            for layout, grad in self.state.owned_main_grads():
                for interval in layout.intervals(*layout.shard(self.rank)):
                    yield _tensor_shard(kind, interval, grad, interval.offset)
        else:
            yield from self._arena_shards(kind, self.state.owned_intervals())

    def local_shards(self, kind: str) -> Iterator[TensorShard]:
        yield from self._arena_shards(kind, self.state.local_intervals())

    def _arena_shards(self, kind: str, intervals: Iterator[tuple[ShardInterval, int]]) -> Iterator[TensorShard]:
        arena = self._arena(kind)
        for interval, start in intervals:
            yield _tensor_shard(kind, interval, arena, start)

    def _arena(self, kind: str) -> Tensor:
        state = self.state
        return {MASTER: state.master, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}[kind]

    def _storages(self) -> dict[str, list[Tensor]]:
        return self.state.storages()

    def memory_formula(self) -> dict[str, int]:
        numel = {1: 0, 2: 0, 4: 0}  # by bytes of an element
        for spec in (slot.spec for layout in self.state.layouts for slot in layout.slots):
            numel[spec.replica_dtype.itemsize] += spec.numel
        return memory_formula(
            STAGES[self.options.zero_stage],
            reduced_numel=numel[2],
            fp32_numel=numel[4],
            reduced_bytes=2,
            world_size=self.world_size,
            float8_numel=numel[1],
            float8_copies=self.state.scales.num_copies,
        )

    def full_state(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        state = self.state
        full = state.full_main_grads() if kind == MAIN_GRAD else state.full_tensors(self._arena(kind))
        for spec, tensor in full:
            yield spec.name, tensor


def _tensor_shard(kind: str, interval: ShardInterval, values: Tensor, start: int) -> TensorShard:
    spec, data = interval.spec, values[start : start + interval.stop - interval.start]
    return TensorShard(spec.name, kind, spec.shape, torch.float32, interval.start, interval.stop, data)
