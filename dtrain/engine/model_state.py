"""The model states of an engine: master weights, moments, gradients and compute weights, as its library holds them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from dtrain.checkpoint.snapshot import TensorShard
from dtrain.engine.interface import Engine
from dtrain.engine.request import EngineRequest
from dtrain.errors import ContractError
from dtrain.parameters.local_shards import check_frozen, full_tensors

MASTER, MAIN_GRAD = "master", "main_grad"
MOMENTS = ("exp_avg", "exp_avg_sq")

_MANAGED: WeakSet[nn.Module] = WeakSet()  # weak, so that it keeps no model alive


def is_managed(model: nn.Module) -> bool:
    return model in _MANAGED


class StateEngine(Engine):
    """The part of an engine that is not the step: its model states, and their checks.

    A subclass calls this constructor before a library replaces the parameters by shards, and :meth:`check_contract` at
    the end of its own constructor, when all states exist.

    Args:
        request: the validated arguments of ``initialize``.

    Attributes:
        options: the options of a step.
        run_id: of the run, kept by its checkpoints.
        seed: keys the random numbers of forwards.
        shapes: shape of each trainable parameter, by name.
    """

    def __init__(self, request: EngineRequest) -> None:
        super().__init__()
        # first: if the constructor of a subclass fails half-way, the model is changed already and cannot be used again
        _MANAGED.add(request.model)
        self.module = request.model
        self.comm = request.comm
        self.policy = request.contract.policy
        self.contract = request.contract
        self.options = request.step
        self.run_id = request.identity.run_id
        self.seed = request.identity.seed
        # before a subclass shards the model: a library may replace the parameters by their shards
        self.shapes = {name: tuple(p.shape) for name, p in self.module.named_parameters() if p.requires_grad}
        self.num_parameters = sum(map(math.prod, self.shapes.values()))
        self._frozen = [(name, p) for name, p in self.module.named_parameters() if not p.requires_grad]
        self._is_unobserved = True  # no forward since set-up or load has been checked against the contract

    def check_contract(self) -> None:
        """Checks the contract on live tensors: now the weights, masters and moments, in the next forward the rest.

        Raises:
            ContractError: naming the tensor whose dtype or storage is another one.
        """
        self._check_step()
        self._check_live()
        storages = self._storages()
        for kind in ("master", "moments"):
            for tensor in storages[kind]:
                if tensor.dtype != torch.float32:
                    shape = list(tensor.shape)
                    raise ContractError(f"{kind} of shape {shape} is {tensor.dtype}; the contract says float32")
        self._is_unobserved = True

    def memory(self) -> dict[str, int]:
        storages = {**self._storages(), "buffers": [*self.module.buffers(), *(p for _, p in self._frozen)]}
        return {kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in storages.items()}

    def full_state(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, full FP32 tensor) of ``master``, a moment or ``main_grad``; all ranks call."""
        return full_tensors(self.owned_shards(kind), self.shapes, self.comm)

    # -- hooks for subclasses ----------------------------------------------------------------------------------------

    @abstractmethod
    def owned_shards(self, kind: str) -> Iterator[TensorShard]:
        """Yields this rank's share of ``master``, ``exp_avg``, ``exp_avg_sq`` or ``main_grad``: FP32 views.

        At most one interval a parameter; the shards of all ranks hold every element once. Of a state that all ranks
        hold, each rank owns a part.
        """

    @abstractmethod
    def local_shards(self, kind: str) -> Iterator[TensorShard]:
        """Yields all of ``kind`` that lies on this rank and that a load must fill."""

    @abstractmethod
    def _storages(self) -> dict[str, list[Tensor]]:
        """Returns the tensors that hold this rank's model states, by the kinds of :meth:`memory` except buffers."""

    @abstractmethod
    def _check_live(self) -> None:
        """Checks the contract on the live tensors; raises ``ContractError`` naming the tensor."""

    def _check_step(self) -> None:
        """Checks before each update what is cheap to check: the model still computes with the engine's weights."""
        for name, parameter in self._frozen:
            check_frozen(name, parameter, self.contract.replica_dtypes[name])

    def saved_state(self) -> dict[str, Any]:
        """Returns what a checkpoint's ``engine_state`` holds of this engine alone; plain values."""
        return {}

    def restore_state(self, saved: Mapping[str, Any]) -> None:
        """Restores what :meth:`saved_state` returned, if ``saved`` has it; the masters are loaded by then."""
