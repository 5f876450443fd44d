"""The model states of an engine, as its library holds them: masters, optimizer states, gradients, compute weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from dtrain.checkpoint.frozen_source import FrozenSource
from dtrain.checkpoint.snapshot import TensorShard
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.mesh import Mesh
from dtrain.errors import ContractError
from dtrain.parameters.compute_shard import ComputeShard
from dtrain.parameters.groups import aliases
from dtrain.parameters.guarded_reads import ParameterReads
from dtrain.parameters.local_shards import LocalShards, check_frozen, full_tensors
from dtrain.parameters.optimizer_plan import OptimizerPlan
from dtrain.parameters.squares import sum_squares
from dtrain.precision.contract import Contract
from dtrain.precision.fake import is_plain

MASTER, MAIN_GRAD = "master", "main_grad"
MOMENTS = "moments"
"""Key of all optimizer states in ``ModelStates.memory``, whatever the optimizer calls them."""
_KINDS = ("compute", "unsharded", MAIN_GRAD, MASTER, MOMENTS, "unreduced_grad", "frozen", "buffers")


@dataclass(frozen=True)
class ManagedModel:
    """A model that an engine manages, and what was resolved on it.

    Attributes:
        model: on its device, its values equal on all ranks and not rounded yet.
        contract: the precision policy resolved on it.
        plan: the optimizer resolved on it.
        mesh: the ranks; without hybrid sharding one replica.
    """

    model: nn.Module
    contract: Contract
    plan: OptimizerPlan
    mesh: Mesh

    @property
    def comm(self) -> Communicator:
        """The communicator over all ranks."""
        return self.mesh.world


class FrozenQuantized(Protocol):
    """Frozen weights that are held in FP8 only, such as ``dtrain.sharding.frozen_float8.FrozenFloat8``."""

    @property
    def name(self) -> str: ...

    @property
    def names(self) -> list[str]: ...

    @property
    def is_saved_here(self) -> bool: ...

    def codes(self) -> Iterator[TensorShard]: ...

    def new_values(self) -> Tensor: ...

    def shards(self, values: Tensor) -> Iterator[TensorShard]: ...

    def saved_shards(self) -> Iterator[TensorShard]: ...

    def write(self, values: Tensor) -> None: ...

    def is_cast_of(self, values: Tensor) -> bool: ...


class ModelStates(ABC):
    """The model states of one engine on this rank; audit, checkpoint, averages and written weights work on them.

    A subclass calls this constructor before its library replaces the parameters by shards.

    Args:
        managed: the model.
        engine: name of the engine.
        zero_stage: its stage.

    Attributes:
        module, contract, plan, mesh, engine, zero_stage: see above.
        comm: all ranks.
        shapes: shape of each trainable parameter, by name.
        frozen: the frozen parameters, by name.
        frozen_bytes: of all frozen parameters, whole.
        frozen_source: the folder whose weights they are, so that checkpoints hold none; None: they are saved.
        aliases: {second name of a tied parameter: its first}.
        modules: the modules by name; one that is wrapped later keeps it.
        reads: guards the parameters between the calls of the engine.
    """

    def __init__(self, managed: ManagedModel, engine: str, zero_stage: int) -> None:
        self.module, self.contract, self.plan = managed.model, managed.contract, managed.plan
        self.mesh, self.comm = managed.mesh, managed.comm
        self.engine, self.zero_stage = engine, zero_stage
        parameters = dict(self.module.named_parameters())
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items() if p.requires_grad}
        self.frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
        dtypes = self.contract.replica_dtypes
        self.frozen_bytes = sum(p.numel() * dtypes[name].itemsize for name, p in self.frozen.items())
        self.frozen_source: FrozenSource | None = None
        self.aliases = aliases(self.module)
        self.modules = dict(self.module.named_modules(remove_duplicate=False))
        self.reads = ParameterReads(self)

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by name; first read when the engine is complete, because its library may replace them."""
        return dict(self.module.named_parameters())

    @property
    def num_parameters(self) -> int:
        """Elements of all trained parameters."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def saved_dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of the masters and of each optimizer state, by kind: what a checkpoint holds of the parameters."""
        return {MASTER: torch.float32, **{kind: spec.dtype for kind, spec in self.plan.specs.items()}}

    # -- memory ------------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Returns the bytes on this rank by kind; see ``dtrain.engine.interface.Engine.memory``."""
        return {kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in self.storages().items()}

    def storages(self) -> dict[str, list[Tensor]]:
        """Returns the tensors that this rank holds between steps, by the kinds of ``memory``."""
        with self.reads:
            storages = {
                MASTER: self.held(MASTER),
                MOMENTS: [tensor for kind in self.plan.specs for tensor in self.held(kind)],
                "frozen": list(self.replicated_frozen().values()),
                **self._storages(),
                "buffers": list(self.module.buffers()),
            }
        kinds = [*_KINDS, *(kind for kind in storages if kind not in _KINDS)]
        return {kind: storages[kind] for kind in kinds}

    @property
    def host_kinds(self) -> Collection[str]:
        """The kinds of ``memory`` that lie in the host's memory beside a GPU (``offload=cpu``)."""
        if self.comm.device.type == "cpu":
            return ()
        held = {kind: {t.device.type for t in tensors if t.numel()} for kind, tensors in self.storages().items()}
        return [kind for kind, types in held.items() if types == {"cpu"}]

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer states of all parameters, whole."""
        return self.plan.state_bytes({name: math.prod(shape) for name, shape in self.shapes.items()})

    @abstractmethod
    def memory_formula(self) -> dict[str, int]:
        """Returns the bytes on this rank by the ZeRO formula: compute, main_grad, master, moments, frozen."""

    @abstractmethod
    def held(self, kind: str) -> list[Tensor]:
        """Returns the tensors that hold this rank's masters, or the optimizer state called ``kind``."""

    @abstractmethod
    def _storages(self) -> dict[str, list[Tensor]]:
        """Returns the tensors that hold the rest, by the kinds of ``memory``: all except states and buffers.

        Masters too, if they are not held in FP32.
        """

    # -- masters, optimizer states and main grads --------------------------------------------------------------------

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

    def full_state(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, full tensor) of ``master``, ``main_grad`` or a state of those that have it; all ranks call."""
        dtype = self.saved_dtypes.get(kind, torch.float32)
        shapes = {n: shape for n, shape in self.shapes.items() if self.plan.has_state(self.plan.numbers[n], kind)}
        return full_tensors(self.owned_shards(kind), dtype, shapes, self.comm)

    def squares(self) -> Tensor:
        """Returns FP64 [n], n >= 1, whose sum is that of the squares of this rank's own main grads."""
        grads = [shard.data for shard in self.owned_shards(MAIN_GRAD) if shard.data.numel()]
        if not grads:
            return torch.zeros(1, dtype=torch.float64, device=self.comm.device)
        return sum_squares(grads)

    # -- compute weights ---------------------------------------------------------------------------------------------

    @abstractmethod
    def refresh(self) -> None:
        """Casts the masters into the compute weights; all ranks call."""

    def release(self) -> None:  # noqa: B027 - only DeepSpeed keeps any
        """Frees weights that forwards left unsharded; called before ``refresh``, or forwards would use old ones."""

    def compute_shards(self) -> Iterator[ComputeShard]:
        """Yields what this rank keeps of the compute weights beside the masters, as it is now; none by default."""
        return iter(())

    def whole_compute_shards(self) -> Iterator[ComputeShard]:
        """Yields the same, in intervals whose number does not grow with the ranks, if the engine cuts by owner."""
        return self.compute_shards()

    def open_weights(self, names: Collection[str]) -> None:  # noqa: B027 - most have nothing to open
        """Lets the parameters called ``names``, which become whole masters, be read and written; no names end it."""

    def unsharded_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the tensors that stand for sharded parameters in the model while these are unsharded."""
        return {}

    def unreachable_parameters(self) -> Collection[str]:
        """Returns the parameters whose writes reach no weight now: [Note: written weights]."""
        return ()

    def unshared_parameters(self) -> Collection[str]:
        """Returns those that may get no second name: they have values only while the units run that held them first."""
        return ()

    def await_readers(self) -> None:  # noqa: B027 - most have no readers
        """Returns when no other rank reads this one's parameters any more; all ranks call.

        The engine itself writes them after the next vote only ([Note: buffer reuse]); the user may do so at once.
        """

    # -- frozen parameters -------------------------------------------------------------------------------------------

    def frozen_shards(self) -> Iterator[TensorShard]:
        """Yields this rank's shards of the frozen parameters that the engine shards, not in FP8; none by default."""
        return iter(())

    @property
    def frozen_float8(self) -> Sequence[FrozenQuantized]:
        """The frozen weights that the engine holds in FP8 only, equal groups on all ranks; none by default."""
        return ()

    def replicated_frozen(self) -> dict[str, Tensor]:
        """Returns the frozen parameters of which every rank holds all, by name."""
        with self.reads:
            return {name: p.detach() for name, p in self.frozen.items()}

    def whole_frozen(self) -> AbstractContextManager[None]:
        """Context in which the frozen parameters that the library shards are whole on every rank; all ranks enter."""
        return nullcontext()

    def full_frozen(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, full tensor) of the frozen parameters that can be written; all ranks call."""
        with self.whole_frozen():
            for name, values in self.replicated_frozen().items():
                if is_plain(self.frozen[name]):
                    yield name, values

    def take_frozen(self, values: Mapping[str, Tensor]) -> None:
        """Overwrites frozen parameters, given whole, by name; all ranks call."""
        with self.whole_frozen() if values else nullcontext():
            for name, held in self.replicated_frozen().items():
                if name in values:
                    held.copy_(values[name])
        for shard in self.frozen_shards():
            if shard.name in values:
                shard.write(values[shard.name].reshape(-1)[shard.start : shard.stop])

    # -- the contract ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks the contract on the tensors that this rank holds between steps.

        Raises:
            ContractError: naming the tensor whose dtype or storage is another one.
        """
        self.check_step()
        for kind, dtype in self.saved_dtypes.items():
            for tensor in self.held(kind):
                if tensor.dtype != dtype:
                    expected = str(dtype).removeprefix("torch.")
                    raise ContractError(
                        f"{kind} of shape {list(tensor.shape)} is {tensor.dtype}; the contract says {expected}"
                    )

    def check_formats(self) -> None:
        """Checks the dtype of every parameter, and that the FP8 modules are in the model."""
        held = set(self.module.modules())
        own = {name: module for name, module in self.modules.items() if module in held}
        self.contract.check_parameters(self.parameters, dict(self.module.named_modules()) | own)

    def check_step(self) -> None:
        """Checks before each update what is cheap to check: the model still computes with the engine's weights."""
        for name, parameter in self.frozen.items():
            check_frozen(name, parameter, self.contract.parameter_dtype(name))


class LocalStates(ModelStates):
    """Model states whose masters are ``dtrain.parameters.local_shards.LocalShards``, set by the subclass."""

    local: LocalShards

    def owned_shards(self, kind: str) -> Iterator[TensorShard]:
        return self.local.owned_shards(kind)

    def local_shards(self, kind: str) -> Iterator[TensorShard]:
        return self.local.local_shards(kind)

    def held(self, kind: str) -> list[Tensor]:
        return self.local.tensors(kind)
