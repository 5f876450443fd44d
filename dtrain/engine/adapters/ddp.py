"""PyTorch's DistributedDataParallel under dtrain's contract, vote and update: the plain baseline.

The weights are FP32, autocast casts them in each forward, and every rank holds all masters, moments and gradients.
The weights of FP8 products are cast to FP8 once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.distributed.communicator import recorded
from dtrain.distributed.progress import Phase
from dtrain.engine.interface import Engine
from dtrain.engine.observation import ReduceDtypeCheck
from dtrain.engine.request import EngineRequest
from dtrain.engine.step import StepEngine
from dtrain.errors import ContractError
from dtrain.optim.rule import UpdateScalars
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.parameters.groups import backward_names, find_groups
from dtrain.parameters.local_shards import LocalShard, LocalShards, check_in_place
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.parameters.model_states import LocalStates
from dtrain.parameters.running_backward import require_running
from dtrain.parameters.taken_gradient import held_gradient
from dtrain.precision.contract import Contract
from dtrain.precision.float8.linear import Float8Linear
from dtrain.precision.float8.weights import Cache, QuantizedWeight
from dtrain.precision.policy import refuse_sparse_gradients
from dtrain.sharding.placement import STAGES, memory_formula


def build(request: EngineRequest) -> Engine:
    return DdpEngine(request)


class DdpEngine(StepEngine):
    """The step over DistributedDataParallel, which a single rank does not use.

    Micro-batches accumulate on each rank; the last one's backward sums them over the ranks, bucket by bucket.
    """

    name = "ddp"
    searches_backward = keeps_gradients = True

    def __init__(self, request: EngineRequest) -> None:
        model = request.model
        self._ddp_states = states = DdpStates(request, self.name, request.step.zero_stage)
        super().__init__(request, states, backward_names(find_groups(model)))
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        states.trained = self._parameters
        # FP32, because the parameters are the masters; contiguous, because shards are flat views
        for parameter in self._parameters.values():
            parameter.data = parameter.data.float().contiguous()
        states.float8_weights = _cache_float8(model, self.contract)
        numbers = states.plan.numbers
        shards = [
            LocalShard(name, tuple(p.shape), 0, p.detach().view(-1), torch.empty(0), numbers[name], replicated=True)
            for name, p in self._parameters.items()
        ]
        states.local = LocalShards(shards, states.plan, self.comm)
        self._gradients = _Gradients(self.monitor, self.comm.process_group)
        # tensor hooks run before a gradient is accumulated, so it is weighted before it enters a bucket
        for number, name in enumerate(self._backward_names):
            parameter = self._parameters[name]
            parameter.register_hook(self._gradients.hook(name, number, ref(parameter)))
            parameter.register_post_accumulate_grad_hook(self._gradients.after_accumulation(name, number))
        self._replicated: DistributedDataParallel | None = None
        if self.comm.process_group is not None:
            self._replicated = self._replicate()
        self.check_contract()

    @property
    def timed_phases(self) -> Sequence[Phase]:
        return (Phase.DATA, Phase.FORWARD)  # DistributedDataParallel waits in its own backward

    def _replicate(self) -> DistributedDataParallel:
        replicated = DistributedDataParallel(
            _LossModule(self._parameters.values()),
            process_group=self.comm.process_group,
            init_sync=False,  # dtrain.initialize has broadcast the weights
            gradient_as_bucket_view=True,
        )
        replicated.register_comm_hook(self._gradients, lambda gradients, bucket: gradients.sum(bucket.buffer()))
        return replicated

    # -- a step ------------------------------------------------------------------------------------------------------

    def _call_model(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.module(*args, **kwargs)

    def _backward(self, loss: Tensor, weight: Weight) -> None:
        replicated = self._replicated
        if replicated is None or not self._batch.current.is_last:
            accumulates = nullcontext() if replicated is None else replicated.no_sync()
            with self._gradients.weighted(weight, self._batch.number), accumulates:
                self._differentiate(loss)
            return
        self._agree_on_sums()
        with self._gradients.weighted(weight, self._batch.number):
            self._differentiate(replicated(loss))
        self._add_zeros()

    def _agree_on_sums(self) -> None:
        # also on the order of its buckets, which DistributedDataParallel broadcasts in the second step
        self.comm.agree("all_reduce", "gradients", recorded(torch.float32, self.num_parameters))

    def _differentiate(self, loss: Tensor) -> None:
        if loss.requires_grad:
            (loss * self.loss_scale.scale).backward()

    def _add_zeros(self) -> None:
        """Gives zeros to the parameters without a gradient in the last micro-batch, so that every bucket is summed.

        DistributedDataParallel itself can find them, but then the host waits for the device to read which of them
        another rank has used.
        """
        missing = [p for name, p in self._parameters.items() if name not in self._gradients.received]
        frozen = [p for p in missing if not p.requires_grad]  # by the user, for this micro-batch
        for parameter in frozen:
            parameter.requires_grad_(True)
        if missing:
            with self._gradients.weighted(Weight(torch.ones(()), is_one=True), None), torch.enable_grad():
                torch.stack([parameter.reshape(-1)[:0].sum() for parameter in missing]).sum().backward()
        for parameter in frozen:
            parameter.requires_grad_(False)

    def _finish_gradients(self) -> None:
        """Completes the main grads: parameters without a gradient in this step get zeros.

        Raises:
            ContractError: not all gradients were summed over the ranks, once.
        """
        if self._replicated is not None:
            self._finish_sums(self._replicated)
        for shard in self._ddp_states.local.shards:
            parameter = self._parameters[shard.name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            refuse_sparse_gradients([(shard.name, parameter.grad)])
            shard.main_grad = parameter.grad.view(-1)
        self._gradients.reduce_dtype_check = None

    def _finish_sums(self, replicated: DistributedDataParallel) -> None:
        if not self._gradients.num_summed:  # the last micro-batch had no backward
            self._gradients.received.clear()
            self._agree_on_sums()
            with torch.enable_grad():
                replicated(None)
            self._add_zeros()
        if self._gradients.reduce_dtype_check is not None:
            self._gradients.reduce_dtype_check.require_complete()
        # a bucket that is never launched would leave the ranks with different gradients silently
        total = sum(parameter.numel() for parameter in replicated.parameters())
        if self._gradients.num_summed != total:
            raise ContractError(
                f"DistributedDataParallel summed {self._gradients.num_summed} elements of gradients over the ranks in "
                f"step {self.attempted_steps}, expected {total}: the ranks would diverge; build a new engine and load "
                f"a checkpoint"
            )

    def _update(self, scalars: UpdateScalars) -> None:
        self._ddp_states.local.update(scalars)
        self.states.refresh()

    def _clear_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        for shard in self._ddp_states.local.shards:
            shard.main_grad = torch.empty(0)
        self._gradients.num_summed = 0

    def _watch_reductions(self) -> None:
        self._gradients.reduce_dtype_check = ReduceDtypeCheck(self.policy)


class DdpStates(LocalStates):
    """Whole masters, optimizer states and main grads on every rank.

    Attributes:
        trained: the trained parameters, which are the masters, by name.
        float8_weights: their FP8 copies.
    """

    trained: Mapping[str, nn.Parameter]
    float8_weights: Sequence[QuantizedWeight] = ()

    def refresh(self) -> None:
        # the weights are the masters; only their FP8 copies are cast again, at their next use
        for weights in self.float8_weights:
            weights.invalidate()

    def replicated_masters(self) -> Collection[str]:
        return self.trained

    def check(self) -> None:
        super().check()
        self.check_formats()

    def check_step(self) -> None:
        super().check_step()
        for shard in self.local.shards:
            parameter = self.trained[shard.name]
            check_in_place(shard.name, parameter, parameter, shard.master)

    def _storages(self) -> dict[str, list[Tensor]]:
        return {
            "compute": [tensor for weights in self.float8_weights for tensor in weights.cached()],
            "unsharded": [],
            "main_grad": [grad for p in self.trained.values() if (grad := held_gradient(p)) is not None],
            "unreduced_grad": [],
            **self.local.storages,
        }

    def memory_formula(self) -> dict[str, int]:
        """Returns bytes on a rank: nothing is sharded, the weights are the masters, FP8 copies exist in a step only."""
        numel, states, frozen = self.num_parameters, self.state_bytes, self.frozen_bytes
        return memory_formula(STAGES[0], numel=numel, state_bytes=states, frozen_bytes=frozen)


def _cache_float8(model: nn.Module, contract: Contract) -> list[QuantizedWeight]:
    """Lets the FP8 modules cast their weights once a step, not in each forward; returns those weights."""
    weights = []
    for name in contract.float8_modules:
        linear = cast(Float8Linear, model.get_submodule(name))
        linear.quantized_weight = QuantizedWeight(linear.recipe, Cache.UNTIL_WRITTEN)
        weights.append(linear.quantized_weight)
    return weights


class _Gradients:
    """Weights gradients as they leave backward, and sums them over the ranks bucket by bucket.

    The hooks refer to this object and not to the engine: C++ holds them, where the garbage collector finds no cycle.

    Args:
        monitor: records every gradient as it leaves this rank's backward.

    Attributes:
        reduce_dtype_check: checks the buckets in the first step; None afterwards.
        num_summed: elements that were summed over the ranks in the current step.
        received: names of the parameters with a gradient in the current backward.
    """

    def __init__(self, monitor: GradientMonitor, group: dist.ProcessGroup | None) -> None:
        self.reduce_dtype_check: ReduceDtypeCheck | None = None
        self.num_summed = 0
        self.received: set[str] = set()
        self._monitor = monitor
        self._group = group
        self._weight: Weight | None = None  # of the current backward
        self._micro_batch: int | None = None
        self._kept: dict[str, Tensor | None] = {}  # gradients of this engine while another's are accumulated

    @contextmanager
    def weighted(self, weight: Weight, micro_batch: int | None) -> Iterator[None]:
        """Multiplies the gradients of a backward inside by ``weight``; records them unless ``micro_batch`` is None."""
        self._weight, self._micro_batch = weight, micro_batch
        self.received.clear()
        yield
        self._weight = None  # not after an error: the engine is unusable then

    def hook(
        self, name: str, number: int, parameter: Callable[[], nn.Parameter | None]
    ) -> Callable[[Tensor | None], Tensor | None]:
        def on_gradient(grad: Tensor | None) -> Tensor | None:
            if self._weight is None:
                require_running(name)
                if (owner := parameter()) is not None:  # [Note: another engine's backward]
                    self._kept[name], owner.grad = owner.grad, None
                return None
            self.received.add(name)
            if grad is None:  # a backward of the user's own has returned None
                return None
            if self._micro_batch is not None:
                self._monitor.receive(number)
                self._monitor.record_magnitude(number, grad)
            return None if self._weight.is_one else grad * self._weight.value

        return on_gradient

    def after_accumulation(self, name: str, number: int) -> Callable[[Tensor], None]:
        def on_accumulated(parameter: Tensor) -> None:
            if name in self._kept:
                parameter.grad = self._kept.pop(name)
            elif self._weight is not None and self._micro_batch is not None and parameter.grad is not None:
                # only now: hooks that were added to the parameter later have run, and no other rank's gradient is in it
                self._monitor.record_finiteness(self._micro_batch, number, parameter.grad)

        return on_accumulated

    def sum(self, bucket: Tensor) -> torch.futures.Future[Tensor]:
        """Starts the sum of the gradients in ``bucket``, FP32 [n]; by default the library forms the mean."""
        if self.reduce_dtype_check is not None:
            self.reduce_dtype_check.record("all", bucket)
        self.num_summed += bucket.numel()
        future: Any = dist.all_reduce(bucket, group=self._group, async_op=True).get_future()
        summed: torch.futures.Future[Tensor] = future.then(lambda done: done.value()[0])
        return summed


class _LossModule(nn.Module):
    """The module that DistributedDataParallel wraps: its forward, of the loss, announces a backward that sums.

    It holds the parameters and not the model, so that buffers stay local to each rank, as with the other engines.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.trained = nn.ParameterList(parameters)

    def forward(self, loss: Tensor | None) -> Tensor | None:
        return loss
