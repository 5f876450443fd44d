"""The model states of an engine, as its library holds them: masters, optimizer states, gradients, compute weights."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from dtrain.checkpoint.snapshot import TensorShard
from dtrain.engine.interface import Engine
from dtrain.engine.request import EngineRequest
from dtrain.errors import ContractError
from dtrain.parameters.compute_shard import ComputeShard
from dtrain.parameters.local_shards import check_frozen, full_tensors
from dtrain.parameters.squares import sum_squares
from dtrain.precision.fake import is_plain
from dtrain.sharding.frozen_float8 import FrozenFloat8

MASTER, MAIN_GRAD = "master", "main_grad"
MOMENTS = "moments"
"""Key of all optimizer states in :meth:`Engine.memory`, whatever the optimizer calls them."""
_KINDS = ("compute", "unsharded", MAIN_GRAD, MASTER, MOMENTS, "unreduced_grad", "frozen", "buffers")

F = TypeVar("F", bound=Callable[..., Any])

_MANAGED: WeakSet[nn.Module] = WeakSet()  # weak, so that it keeps no model alive


def is_managed(model: nn.Module) -> bool:
    return model in _MANAGED


def names_collectives(name: str) -> Callable[[F], F]:
    """Decorates a method of an engine whose collectives carry ``name``: ranks in different methods fail by name."""

    def decorate(method: F) -> F:
        @wraps(method)
        def named(self: StateEngine, *args: Any, **kwargs: Any) -> Any:
            with self.comm.schedule.method(name):
                return method(self, *args, **kwargs)

        return cast(F, named)

    return decorate


class StateEngine(Engine):
    """The part of an engine that is not the step: its model states, and their checks.

    A subclass calls this constructor before a library replaces the parameters by shards, and :meth:`check_contract` at
    the end of its own constructor, when all states exist.

    Args:
        request: the validated arguments of ``initialize``.

    Attributes:
        options: the options of a step.
        mesh: all ranks, those that share the states of this rank's replica, and those that hold the same shard.
        progress: what this rank does at the moment.
        plan: the optimizer of each parameter, whose states the engine holds beside the masters.
        run_id: of the run, kept by its checkpoints.
        seed: keys the random numbers of forwards.
        shapes: shape of each trainable parameter, by name.
        frozen: the frozen parameters, by name.
        frozen_source: the folder whose weights they are, so that checkpoints hold none; None: they are saved.
    """

    def __init__(self, request: EngineRequest) -> None:
        super().__init__()
        # first: if the constructor of a subclass fails half-way, the model is changed already and cannot be used again
        _MANAGED.add(request.model)
        self.module = request.model
        self.comm, self.mesh = request.comm, request.mesh
        self.progress = request.comm.schedule.progress
        self.policy = request.contract.policy
        self.contract = request.contract
        self.options = request.step
        self.plan = request.plan
        self.ema_decay = request.plan.ema_decay
        self.run_id = request.identity.run_id
        self.seed = request.identity.seed
        # before a subclass shards the model: a library may replace the parameters by their shards
        self.shapes = {name: tuple(p.shape) for name, p in self.module.named_parameters() if p.requires_grad}
        self.num_parameters = sum(map(math.prod, self.shapes.values()))
        self.frozen = {name: p for name, p in self.module.named_parameters() if not p.requires_grad}
        dtypes = self.contract.replica_dtypes
        self._frozen_bytes = sum(p.numel() * dtypes[name].itemsize for name, p in self.frozen.items())
        self.frozen_source = request.frozen_source
        self._is_unobserved = True  # no forward since set-up or load has been checked against the contract

    def check_contract(self) -> None:
        """Checks the contract on live tensors: now weights, masters and optimizer states, in the next forward the rest.

        Raises:
            ContractError: naming the tensor whose dtype or storage is another one.
        """
        self._check_step()
        self._check_live()
        for kind, dtype in self.saved_dtypes.items():
            for tensor in self._held(kind):
                if tensor.dtype != dtype:
                    expected = str(dtype).removeprefix("torch.")
                    raise ContractError(
                        f"{kind} of shape {list(tensor.shape)} is {tensor.dtype}; the contract says {expected}"
                    )
        self._is_unobserved = True

    @property
    def saved_dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of the masters and of each optimizer state, by kind: what a checkpoint holds of the parameters."""
        return {MASTER: torch.float32, **{kind: spec.dtype for kind, spec in self.plan.specs.items()}}

    def memory(self) -> dict[str, int]:
        return {kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in self.storages().items()}

    def storages(self) -> dict[str, list[Tensor]]:
        """Returns the tensors that this rank holds between steps, by the kinds of :meth:`memory`."""
        storages = {
            MASTER: self._held(MASTER),
            MOMENTS: [tensor for kind in self.plan.specs for tensor in self._held(kind)],
            "frozen": list(self.replicated_frozen().values()),
            **self._storages(),
            "buffers": list(self.module.buffers()),
        }
        kinds = [*_KINDS, *(kind for kind in storages if kind not in _KINDS)]
        return {kind: storages[kind] for kind in kinds}

    @property
    def host_kinds(self) -> Collection[str]:
        if self.device.type == "cpu":
            return ()
        held = {kind: {t.device.type for t in tensors if t.numel()} for kind, tensors in self.storages().items()}
        return [kind for kind, types in held.items() if types == {"cpu"}]

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer states of all parameters, whole."""
        return self.plan.state_bytes({name: math.prod(shape) for name, shape in self.shapes.items()})

    @property
    def frozen_bytes(self) -> int:
        """Bytes of all frozen parameters, whole."""
        return self._frozen_bytes

    def full_state(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, full tensor) of ``master``, ``main_grad`` or a state of those that have it; all ranks call."""
        dtype = self.saved_dtypes.get(kind, torch.float32)
        shapes = {n: shape for n, shape in self.shapes.items() if self.plan.has_state(self.plan.numbers[n], kind)}
        return full_tensors(self.owned_shards(kind), dtype, shapes, self.comm)

    # -- hooks for subclasses ----------------------------------------------------------------------------------------

    @abstractmethod
    def owned_shards(self, kind: str) -> Iterator[TensorShard]:
        """Yields this rank's share of ``master``, an optimizer state or ``main_grad``: views of the live tensors.

        At most one interval a parameter; the shards of ``mesh.shard``, the ranks of a replica, hold every element once.
        Of a state that each of them holds whole, each owns a part.
        """

    @abstractmethod
    def local_shards(self, kind: str) -> Iterator[TensorShard]:
        """Yields all of ``kind`` that lies on this rank and that a load must fill."""

    def replicated_masters(self) -> Collection[str]:
        """Returns the parameters whose whole master and optimizer states every rank holds; none by default."""
        return ()

    def compute_shards(self) -> Iterator[ComputeShard]:
        """Yields what this rank keeps of the compute weights beside the masters, as it is now; none by default."""
        return iter(())

    def whole_compute_shards(self) -> Iterator[ComputeShard]:
        """Yields the same, in intervals whose number does not grow with the ranks, if the engine cuts by owner."""
        return self.compute_shards()

    def frozen_shards(self) -> Iterator[TensorShard]:
        """Yields this rank's shards of the frozen parameters that the engine shards, not in FP8; none by default."""
        return iter(())

    @property
    def frozen_float8(self) -> Sequence[FrozenFloat8]:
        """The frozen weights that the engine holds in FP8 only, equal groups on all ranks; none by default."""
        return ()

    def replicated_frozen(self) -> dict[str, Tensor]:
        """Returns the frozen parameters of which every rank holds all, by name."""
        return {name: p.detach() for name, p in self.frozen.items()}

    def full_frozen(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, full tensor) of the frozen parameters that can be written; all ranks call."""
        for name, values in self.replicated_frozen().items():
            if is_plain(self.frozen[name]):
                yield name, values

    def take_frozen(self, values: Mapping[str, Tensor]) -> None:
        """Overwrites frozen parameters, given whole, by name; all ranks call."""
        for name, held in self.replicated_frozen().items():
            if name in values:
                held.copy_(values[name])
        for shard in self.frozen_shards():
            if shard.name in values:
                shard.write(values[shard.name].reshape(-1)[shard.start : shard.stop])

    def open_weights(self, names: Collection[str]) -> None:
        """Lets the parameters called ``names``, which become whole masters, be read and written; no names end it."""

    def unreachable_parameters(self) -> Collection[str]:
        """Returns the parameters whose writes reach no weight now: [Note: written weights]."""
        return ()

    def await_readers(self) -> None:
        """Returns when no other rank reads this one's parameters any more; all ranks call.

        The engine itself writes them after the next vote only ([Note: buffer reuse]); the user may do so at once.
        """

    def unsharded_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the tensors that stand for sharded parameters in the model while these are unsharded."""
        return {}

    @abstractmethod
    def _held(self, kind: str) -> list[Tensor]:
        """Returns the tensors that hold this rank's masters, or the optimizer state called ``kind``."""

    @abstractmethod
    def _storages(self) -> dict[str, list[Tensor]]:
        """Returns the tensors that hold the rest, by the kinds of :meth:`memory`: all except states and buffers.

        Masters too, if they are not held in FP32.
        """

    @abstractmethod
    def _check_live(self) -> None:
        """Checks the contract on the live tensors; raises ``ContractError`` naming the tensor."""

    def _squares(self) -> Tensor:
        """Returns FP64 [n], n >= 1, whose sum is that of the squares of this rank's own main grads."""
        grads = [shard.data for shard in self.owned_shards(MAIN_GRAD) if shard.data.numel()]
        if not grads:
            return torch.zeros(1, dtype=torch.float64, device=self.device)
        return sum_squares(grads)

    def _check_step(self) -> None:
        """Checks before each update what is cheap to check: the model still computes with the engine's weights."""
        for name, parameter in self.frozen.items():
            check_frozen(name, parameter, self.contract.parameter_dtype(name))
