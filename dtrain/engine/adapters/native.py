"""dtrain's own engine: sharded FP32 masters, reductions that overlap backward, one vote a step, one update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dtrain.distributed.consensus import on_every_rank
from dtrain.engine.graphs.internals import StepInternals
from dtrain.engine.graphs.step import GraphedStep
from dtrain.engine.interface import Engine
from dtrain.engine.observation import ReduceDtypeCheck
from dtrain.engine.request import EngineRequest
from dtrain.engine.step import StepEngine
from dtrain.engine.vote.record import upload
from dtrain.errors import ConfigError
from dtrain.optim.flat import FlatUpdate
from dtrain.optim.matrix import HeldMatrix, matrix_updates
from dtrain.optim.rule import UpdateScalars
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.sharding.build import build as build_sharded
from dtrain.sharding.build_gradients import grad_dtype
from dtrain.sharding.layout import CHUNK
from dtrain.sharding.quantized_replicas import Float8Views
from dtrain.sharding.replica_sum import across
from dtrain.sharding.states import ShardedStates

if TYPE_CHECKING:
    from dtrain.kernels.squares import SquareSums


def build(request: EngineRequest) -> Engine:
    """Builds the engine; the model's trainable parameters become views of its compute replicas."""
    options = request.step.engine.as_native()
    sharded = build_sharded(request.model, request.contract, request.mesh, options, request.plan)
    return NativeEngine(request, ShardedStates(request, options, sharded))


class NativeEngine(StepEngine):
    """The step of ``dtrain.engine.step.StepEngine`` over ``dtrain.sharding.model.ShardedModel``.

    Args:
        request: model, contract, communicator and options from ``initialize``.
        states: of the model, whose parameters are views of their replicas.
    """

    name = "native"
    searches_backward = True

    def __init__(self, request: EngineRequest, states: ShardedStates) -> None:
        self.sharded = sharded = states.sharded
        backward_names = [name for group in sharded.reducer.groups for name in group.trained]
        super().__init__(request, states, backward_names, sharded.reducer.monitor)
        for views in (replica.views for replica in sharded.replicas):
            if isinstance(views, Float8Views):
                views.attach(self.module)
        self.forward_communicates = sharded.scheduler is not None
        self._reduce_dtype_check: ReduceDtypeCheck | None = None  # until the first step is reduced
        self._square_sums: SquareSums | None = None
        self._optimizer = self._build_optimizer(states)
        self.check_contract()
        states.await_readers()

    # -- a step ------------------------------------------------------------------------------------------------------

    def _call_model(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.module(*args, **kwargs)

    def _backward(self, loss: Tensor, weight: Weight) -> None:
        reducer, micro_batch = self.sharded.reducer, self._batch.current
        # before backward, so that the weights are sent while it runs
        step = self.attempted_steps + 1
        reducer.begin_micro_batch(weight, number=micro_batch.number, last=micro_batch.is_last, step=step)
        if loss.requires_grad:  # else this rank's gradients are zero, and it reduces with the others all the same
            with self.sharded.backward():
                (loss * self.scale()).backward()
        reducer.end_micro_batch()

    def scale(self) -> float | Tensor:
        """Returns the factor of a loss before its backward."""
        return self.loss_scale.scale

    def graphed_step(self, forward: Callable[[Any], Any]) -> GraphedStep:
        own = self._batch, self._losses, self._ballot, self._forward, self._between, self._run
        return GraphedStep(StepInternals(self, *own, self._finalize_step), forward)

    def _discard_forward(self) -> None:
        if self.sharded.scheduler is not None:
            self.sharded.scheduler.reshard()

    def _finish_gradients(self) -> None:
        self.sharded.reducer.finish()
        if self._reduce_dtype_check is not None:  # in the first step only: later ones reduce the same tensors
            self._reduce_dtype_check.require_complete()
            self._reduce_dtype_check = self.comm.schedule.on_reduction = None

    def _squares(self) -> Tensor:
        counts = self.options.reproducible or not self.states.mesh.replicate.rank  # the first replica counts for all
        if self._square_sums is not None and counts:
            return self._square_sums.compute()
        squares = self.states.squares()
        if squares.device.type == self.device.type:  # else with offload=cpu
            return squares
        return upload(squares.sum().view(1).view(torch.int64).tolist(), self.device).view(torch.float64)

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

    def _clear_gradients(self) -> None:
        pass  # the first gradients of a step overwrite the last step's

    def _watch_reductions(self) -> None:
        if self.comm.process_group is None:  # nothing is sent
            return
        during = self.policy.dtype_during_reduction
        dtypes = {layout.name: during(grad_dtype(layout, self.contract)) for layout in self.sharded.layouts}
        if self.states.mesh.is_hybrid:  # whose sums over the replicas are proven to take place, and in FP32
            dtypes |= {across(layout.name): torch.float32 for layout in self.sharded.layouts}
        self._reduce_dtype_check = ReduceDtypeCheck(self.policy, dtypes)
        self.comm.schedule.on_reduction = self._reduce_dtype_check.record

    # -- the optimizer -----------------------------------------------------------------------------------------------

    def _build_optimizer(self, states: ShardedStates) -> FlatUpdate:
        plan, buffers = states.plan, self.sharded.buffers
        # before anything that may fail on a single rank, because it communicates
        shards = [list(buffer.matrix_shards(plan)) for buffer in buffers]
        states.matrices = matrix_updates(plan.rules, shards, states.mesh.shard, self._held_matrices)

        def build() -> FlatUpdate:
            slices = [buffer.update_slices(plan) for buffer in buffers]
            optimizer = FlatUpdate(plan.rules, slices, states.matrices, self.ema_decay)
            if plan.is_compiled and self.sharded.state_device.type == "cuda":
                from dtrain.engine.vote.fused import fused_vote  # it imports Triton, which only GPUs need

                grads = [buffer.gradient.shard for buffer in buffers]
                self._square_sums, tensors = fused_vote(
                    grads, CHUNK, self.options, self.comm, self._ballot.missed.num_words
                )
                self._ballot.tensors, self.monitor.found = tensors, tensors.bad_gradient
            return optimizer

        # a compiler may fail on a single rank
        built: list[FlatUpdate] = []
        on_every_rank(self.comm, "", lambda: built.append(build()), ConfigError, expected=(ConfigError,))
        return built[0]

    def _held_matrices(self, rule: int) -> list[list[HeldMatrix]]:
        """Returns what each rank holds of the parameters that rule number ``rule`` updates."""
        plan, mesh = self.states.plan, self.states.mesh
        return [
            [
                (interval.spec.name, interval.spec.shape, interval.start, interval.stop)
                for buffer in self.sharded.buffers
                for interval in buffer.segment.of_rank(rank).intervals()
                if plan.classes[interval.spec.update_class].rule == rule
            ]
            for rank in range(mesh.shard.world_size)
        ]
