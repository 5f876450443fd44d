"""PyTorch's DistributedDataParallel under our contract, reduction, vote and update: the plain baseline.

The weights are FP32, autocast casts them in each forward, and every rank holds all of masters, moments and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.checkpoint import Piece
from dtrain.engine.base import Engine
from dtrain.engine.holding import Holding, Holdings, check_in_place
from dtrain.engine.observation import WireWatch
from dtrain.engine.request import EngineRequest
from dtrain.engine.voting import VotingEngine
from dtrain.errors import ModelError, UsageError
from dtrain.optim.adamw import UpdateScalars
from dtrain.sharding.accumulate import Weight
from dtrain.sharding.decay import decayed_names
from dtrain.sharding.param_group import find_groups


def build(request: EngineRequest) -> Engine:
    """The engine; the model's parameters are its masters."""
    return DdpEngine(request)


class DdpEngine(VotingEngine):
    """See :class:`dtrain.engine.voting.VotingEngine`.

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
        decayed = decayed_names(model)
        parts = [
            Holding(name, tuple(p.shape), 0, p.detach().view(-1), torch.empty(0), name in decayed, replicated=True)
            for name, p in self._parameters.items()
        ]
        self._holdings = Holdings(parts, request.step.optimizer, (self.rank, self.world_size))
        for number, name in enumerate(self.backward_names):
            self._parameters[name].register_hook(self._on_gradient(name, number))
        self._weight: Weight | None = None  # of the backward under way
        self._watched: int | None = None
        self._wire: WireWatch | None = None
        self._replicated: DistributedDataParallel | None = None
        if self.world_size > 1:
            self._replicated = self._replicate()
        self.check_contract()

    def _replicate(self) -> DistributedDataParallel:
        replicated = DistributedDataParallel(
            _Call(self._parameters.values()),
            init_sync=False,  # the weights are equal already
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
        )
        replicated.register_comm_hook(None, lambda _, bucket: self._sum(bucket.buffer()))
        return replicated

    # -- a step ------------------------------------------------------------------------------------------------------

    def _on_gradient(self, name: str, number: int) -> Callable[[Tensor], Tensor | None]:
        def weigh(grad: Tensor) -> Tensor | None:
            if self._weight is None:
                raise UsageError(f"'{name}' got a gradient outside engine.backward; call engine.backward(loss) instead")
            if self._watched is not None:
                self.watch.look(self._watched, number, [grad])
            return None if self._weight.is_one else grad * self._weight.value

        return weigh

    def _sum(self, bucket: Tensor) -> torch.futures.Future[Tensor]:
        """Sums a bucket over the ranks; DistributedDataParallel would form the mean."""
        if self._wire is not None:
            self._wire.look("all", bucket)
        future: Any = dist.all_reduce(bucket, async_op=True).get_future()
        summed: torch.futures.Future[Tensor] = future.then(lambda done: done.value()[0])
        return summed

    def _forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._replicated is None or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        with self._reducing(self._replicated):
            return self._replicated(lambda: self.module(*args, **kwargs))

    def _reducing(self, replicated: DistributedDataParallel) -> AbstractContextManager[None]:
        """The gradients are summed over the ranks after the last micro-batch alone."""
        return nullcontext() if self._is_last else replicated.no_sync()

    def _backward(self, loss: Tensor, weight: Weight) -> None:
        alone = self._is_last and self._micro_batch == 0 and self.world_size == 1  # then there is nothing to tell apart
        self._weight, self._watched = weight, None if alone else self._micro_batch
        if self._replicated is None:
            if loss.requires_grad:
                (loss * self.loss_scale.scale).backward()
        else:
            with self._reducing(self._replicated):
                if not loss.requires_grad and self._is_last:
                    loss = self._replicated(None)  # the other ranks wait for this one's part in the sums
                if loss.requires_grad:
                    (loss * self.loss_scale.scale).backward()
        self._weight = None

    def finish_gradients(self) -> None:
        """Completes the main grads: those that got no gradient in the step are zero."""
        for part in self._holdings.parts:
            parameter = self._parameters[part.name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            part.main_grad = parameter.grad.view(-1)
        if self._wire is not None and self._replicated is not None:
            self._wire.require_seen()
        self._wire = None

    def _update(self, scalars: UpdateScalars) -> None:
        self._holdings.update(scalars)

    def _refresh(self) -> None:
        """The weights are the masters."""

    def _clear_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        for part in self._holdings.parts:
            part.main_grad = torch.empty(0)

    # -- state -------------------------------------------------------------------------------------------------------

    def own_pieces(self, kind: str) -> Iterator[Piece]:
        """An equal share of each parameter."""
        return self._holdings.own_pieces(kind)

    def held_pieces(self, kind: str) -> Iterator[Piece]:
        """All of ``kind``."""
        return self._holdings.held_pieces(kind)

    def _check_live(self) -> None:
        self.contract.check_parameters(self.module)
        self._wire = WireWatch(self.policy)

    def _check_step(self) -> None:
        super()._check_step()
        for part in self._holdings.parts:
            parameter = self._parameters[part.name]
            check_in_place(part.name, parameter, parameter, part.master)

    def _storages(self) -> dict[str, list[Tensor]]:
        return {
            "master": self._holdings.masters,
            "moments": self._holdings.moments,
            "compute": [],
            "gathered": [],
            "main_grad": [p.grad for p in self._parameters.values() if p.grad is not None],
            "leaf_buffers": [],
        }

    def memory_formula(self) -> dict[str, int]:
        """Bytes on a rank: nothing is sharded, and the weights are the masters."""
        held = 4 * self.num_parameters
        return {"compute": 0, "main_grad": held, "master": held, "moments": 2 * held}


class _Call(nn.Module):
    """What DistributedDataParallel wraps: it runs a forward that is given as a function.

    It knows the parameters and not the model, whose buffers stay each rank's own, as with the other engines.

    Args:
        parameters: those that are trained.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.trained = nn.ParameterList(parameters)
        # DistributedDataParallel warns in every run in which it looks for unused parameters and there is none
        self.unused = nn.Parameter(torch.zeros(1, device=self.trained[0].device))

    def forward(self, run: Callable[[], Any] | None) -> Any:
        """What ``run`` returns; without one, a zero whose gradient is zero for every parameter."""
        if run is not None:
            output = run()
            if torch.is_grad_enabled() and not _has_tensor(output):
                raise ModelError(
                    f"the model's forward returns a {type(output).__name__}, in which DistributedDataParallel finds no "
                    f"tensor; return tensors, or dicts, lists, tuples or dataclasses of them"
                )
            return output
        return torch.stack([parameter.reshape(-1)[:0].sum() for parameter in self.trained]).sum()


def _has_tensor(output: Any) -> bool:
    """Whether DistributedDataParallel, which looks no further, can find what a backward will start from."""
    if isinstance(output, Tensor):
        return True
    if is_dataclass(output):
        output = [getattr(output, item.name) for item in fields(output)]
    elif isinstance(output, Mapping):
        output = list(output.values())
    return isinstance(output, (list, tuple)) and any(map(_has_tensor, output))
