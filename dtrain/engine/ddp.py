"""PyTorch's DistributedDataParallel under our contract, reduction, vote and update: the plain baseline.

The weights are FP32, autocast casts them in each forward, and every rank holds all of masters, moments and gradients.
Those of FP8 products are cast to FP8 once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.checkpoint.snapshot import TensorShard
from dtrain.engine.interface import Engine
from dtrain.engine.observation import ReduceDtypeCheck
from dtrain.engine.request import EngineRequest
from dtrain.engine.step import StepEngine
from dtrain.errors import ContractError, UsageError
from dtrain.optim.adamw import UpdateScalars
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.parameters.groups import find_groups
from dtrain.parameters.local_shards import LocalShard, LocalShards, check_in_place
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.parameters.weight_decay import decayed_names
from dtrain.precision.contract import Contract
from dtrain.precision.float8.linear import Float8Linear
from dtrain.precision.float8.weights import KeptWeights


def build(request: EngineRequest) -> Engine:
    """The engine; the model's parameters are its masters."""
    return DdpEngine(request)


class DdpEngine(StepEngine):
    """See :class:`dtrain.engine.step.StepEngine`.

    Micro-batches accumulate on each rank; the last one's backward sums them over the ranks, bucket by bucket. One rank
    goes without DistributedDataParallel.

    Args:
        request: what ``initialize`` has decided.
    """

    name = "ddp"

    def __init__(self, request: EngineRequest) -> None:
        model = request.model
        groups = find_groups(model)
        by_backward = sorted(range(len(groups)), key=lambda i: (groups[i].name == "", -i))  # the root comes last
        super().__init__(request, [name for i in by_backward for name, _ in reversed(groups[i].parameters)])
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for parameter in self._parameters.values():
            parameter.data = parameter.data.float().contiguous()
        self._float8_weights = _keep_float8(model, self.contract)
        decayed = decayed_names(model)
        parts = [
            LocalShard(name, tuple(p.shape), 0, p.detach().view(-1), torch.empty(0), name in decayed, replicated=True)
            for name, p in self._parameters.items()
        ]
        self._holdings = LocalShards(parts, request.step.optimizer, (self.rank, self.world_size))
        self._gradients = _Gradients(self.monitor)
        for number, name in enumerate(self.backward_names):
            self._parameters[name].register_hook(self._gradients.hook(name, number))
        self._replicated: DistributedDataParallel | None = None
        if self.world_size > 1:
            self._replicated = self._replicate()
        self.check_contract()

    def _replicate(self) -> DistributedDataParallel:
        replicated = DistributedDataParallel(
            _Loss(self._parameters.values()),
            init_sync=False,  # the weights are equal already
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
        )
        replicated.register_comm_hook(self._gradients, lambda gradients, bucket: gradients.sum(bucket.buffer()))
        return replicated

    # -- a step ------------------------------------------------------------------------------------------------------

    def _forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.module(*args, **kwargs)

    def _reducing(self) -> AbstractContextManager[None]:
        """The gradients are summed over the ranks after the last micro-batch alone."""
        return nullcontext() if self._replicated is None or self._is_last else self._replicated.no_sync()

    def _backward(self, loss: Tensor, weight: Weight) -> None:
        with self._gradients.weighted(weight, self._micro_batch), self._reducing():
            if self._replicated is not None and self._is_last:
                # it looks for unused parameters from where backward starts, whatever led there; without a graph this
                # rank gives zeros, for the others wait for its part in the sums
                loss = self._replicated(loss if loss.requires_grad else None)
            if loss.requires_grad:
                (loss * self.loss_scale.scale).backward()

    def finish_gradients(self) -> None:
        """Completes the main grads: those that got no gradient in the step are zero.

        Raises:
            ContractError: not all gradients were summed over the ranks, once.
        """
        if self._replicated is not None:
            self._finish_sums(self._replicated)
        for part in self._holdings.parts:
            parameter = self._parameters[part.name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            part.main_grad = parameter.grad.view(-1)
        self._gradients.reduce_dtype_check = None

    def _finish_sums(self, replicated: DistributedDataParallel) -> None:
        if not self._gradients.num_summed:  # the last micro-batch had no backward
            with self._gradients.weighted(Weight(torch.ones(()), is_one=True), None), torch.enable_grad():
                replicated(None).backward()
        if self._gradients.reduce_dtype_check is not None:
            self._gradients.reduce_dtype_check.require_complete()
        total = sum(parameter.numel() for parameter in replicated.parameters())
        if self._gradients.num_summed != total:
            raise ContractError(
                f"DistributedDataParallel summed {self._gradients.num_summed} elements of gradients over the ranks in "
                f"step {self.attempted_steps}, expected {total}: the ranks would part; build a new engine and load a "
                f"checkpoint"
            )

    def _update(self, scalars: UpdateScalars) -> None:
        self._holdings.update(scalars)
        self._refresh()

    def _refresh(self) -> None:
        """The weights are the masters; what is kept of them in FP8 is cast anew when it is next needed."""
        for weights in self._float8_weights:
            weights.refresh()

    def _clear_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        for part in self._holdings.parts:
            part.main_grad = torch.empty(0)
        self._gradients.num_summed = 0

    # -- state -------------------------------------------------------------------------------------------------------

    def owned_shards(self, kind: str) -> Iterator[TensorShard]:
        """An equal share of each parameter."""
        return self._holdings.owned_shards(kind)

    def local_shards(self, kind: str) -> Iterator[TensorShard]:
        """All of ``kind``."""
        return self._holdings.local_shards(kind)

    def _check_live(self) -> None:
        self.contract.check_parameters(self.module)
        self._gradients.reduce_dtype_check = ReduceDtypeCheck(self.policy)

    def _check_step(self) -> None:
        super()._check_step()
        for part in self._holdings.parts:
            parameter = self._parameters[part.name]
            check_in_place(part.name, parameter, parameter, part.master)

    def _storages(self) -> dict[str, list[Tensor]]:
        return {
            "master": self._holdings.masters,
            "moments": self._holdings.moments,
            "compute": [tensor for weights in self._float8_weights for tensor in weights.tensors()],
            "unsharded": [],
            "main_grad": [p.grad for p in self._parameters.values() if p.grad is not None],
            "unreduced_grad": [],
        }

    def memory_formula(self) -> dict[str, int]:
        """Bytes on a rank: nothing is sharded, the weights are the masters, FP8 ones are kept within a step only."""
        held = 4 * self.num_parameters
        return {"compute": 0, "main_grad": held, "master": held, "moments": 2 * held}


def _keep_float8(model: nn.Module, contract: Contract) -> list[KeptWeights]:
    """Has the FP8 modules keep their cast weights, which were cast in each forward; returns what is kept."""
    kept = []
    for name in contract.float8_modules:
        linear = cast(Float8Linear, model.get_submodule(name))
        linear.source = weights = KeptWeights(linear.recipe)
        kept.append(weights)
    return kept


class _Gradients:
    """What is done to gradients on their way: weighed as they leave backward, summed over the ranks bucket by bucket.

    The hooks hold this and not the engine: they are kept by C++, where no garbage collector finds the way back.

    Args:
        monitor: sees every gradient as it leaves this rank's backward.

    Attributes:
        wire: sees what is sent, in the first step.
        num_summed: elements that were summed over the ranks in the step under way.
    """

    def __init__(self, monitor: GradientMonitor) -> None:
        self.reduce_dtype_check: ReduceDtypeCheck | None = None
        self.num_summed = 0
        self._monitor = monitor
        self._weight: Weight | None = None  # of the backward under way
        self._micro_batch: int | None = None

    @contextmanager
    def weighted(self, weight: Weight, micro_batch: int | None) -> Iterator[None]:
        """Gradients of a backward inside count ``weight`` times; the watch sees those of a ``micro_batch``."""
        self._weight, self._micro_batch = weight, micro_batch
        yield
        self._weight = None

    def hook(self, name: str, number: int) -> Callable[[Tensor], Tensor | None]:
        """For the parameter ``name``, the ``number``-th in backward."""

        def weigh(grad: Tensor) -> Tensor | None:
            if self._weight is None:
                raise UsageError(f"'{name}' got a gradient outside engine.backward; call engine.backward(loss) instead")
            self._monitor.record_magnitude(grad)
            if self._micro_batch is not None:
                self._monitor.record_finiteness(self._micro_batch, number, [grad])
            return None if self._weight.is_one else grad * self._weight.value

        return weigh

    def sum(self, bucket: Tensor) -> torch.futures.Future[Tensor]:
        """Starts the sum of the gradients in ``bucket``, FP32 [n]; DistributedDataParallel would form the mean."""
        if self.reduce_dtype_check is not None:
            self.reduce_dtype_check.record("all", bucket)
        self.num_summed += bucket.numel()
        future: Any = dist.all_reduce(bucket, async_op=True).get_future()
        summed: torch.futures.Future[Tensor] = future.then(lambda done: done.value()[0])
        return summed


class _Loss(nn.Module):
    """What DistributedDataParallel wraps: it passes on the loss from which a backward will start.

    It knows the parameters and not the model, whose buffers stay each rank's own, as with the other engines.

    Args:
        parameters: those that are trained.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.trained = nn.ParameterList(parameters)
        # DistributedDataParallel warns in every run in which it looks for unused parameters and there is none
        self.unused = nn.Parameter(torch.zeros(1, device=self.trained[0].device))

    def forward(self, loss: Tensor | None) -> Tensor:
        """``loss``; without one, a zero whose gradient is zero for every parameter."""
        if loss is not None:
            return loss
        return torch.stack([parameter.reshape(-1)[:0].sum() for parameter in self.trained]).sum()
