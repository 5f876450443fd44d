"""PyTorch's ``fully_shard`` (FSDP2) under our contract, reduction, vote and update.

``fully_shard`` gathers weights and tells when gradients are complete. What is summed, in which dtype and with which
weights, is ours (:mod:`dtrain.engine.fsdp2.communication`), and so is all that follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dtrain.checkpoint.snapshot import TensorShard
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.one_rank import ensure_group
from dtrain.engine.fsdp2.communication import MicroBatch, UnitGradient, UnitWeights, shard_widths
from dtrain.engine.fsdp2.replicated import ReplicatedParameters
from dtrain.engine.fsdp2.units import Unit, plan_units
from dtrain.engine.interface import Engine
from dtrain.engine.observation import ReduceDtypeCheck
from dtrain.engine.request import EngineRequest
from dtrain.engine.step import StepEngine
from dtrain.errors import ConfigError, ModelError
from dtrain.optim.adamw import UpdateScalars
from dtrain.parameters.groups import find_groups
from dtrain.parameters.local_shards import LocalShard, LocalShards, check_in_place
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.parameters.weight_decay import decayed_names


def build(request: EngineRequest) -> Engine:
    """The engine; the model's trainable parameters become shards, or views of their masters.

    Raises:
        ConfigError: this PyTorch is too old.
    """
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            f"engine=fsdp2 needs PyTorch 2.13 or later, where ranks may differ in the parameters that a micro-batch "
            f"uses; this is {torch.__version__}; use engine=native"
        )
    return Fsdp2Engine(request)


class Fsdp2Engine(StepEngine):
    """See :class:`dtrain.engine.step.StepEngine`.

    Args:
        request: what ``initialize`` has decided. Stage 2 keeps gathered weights until the step, stage 3 frees them
            after each use.
    """

    name = "fsdp2"
    forward_communicates = True

    def __init__(self, request: EngineRequest) -> None:
        model, comm, contract = request.model, request.comm, request.contract
        groups = find_groups(model, request.engine.groups)
        by_backward = sorted(range(len(groups)), key=lambda i: (groups[i].name == "", -i))  # the root comes last
        names = [name for i in by_backward for name, _ in reversed(groups[i].parameters)]
        super().__init__(request, names)
        plan = plan_units(model, groups, contract)
        largest = comm.world_size * max(sum(shard_widths(unit.shapes, comm.world_size)) for unit in plan.units)
        numbers = {name: number for number, name in enumerate(names)}
        self._micro = MicroBatch(comm, largest, numbers, self.monitor)
        decayed = decayed_names(model)
        self._replicated = ReplicatedParameters(
            plan.replicated, contract.replica_dtypes, decayed, comm, self._micro.look
        )
        self._reshards = request.step.zero_stage == 3
        mesh = _mesh(comm)
        self._units = [_ShardedUnit(model, unit, mesh, self._micro, reshards=self._reshards) for unit in plan.units]
        parts = [holding for unit in self._units for holding in unit.holdings(comm.rank, decayed, self.shapes)]
        share = (comm.rank, comm.world_size)
        self._holdings = LocalShards([*parts, *self._replicated.holdings], request.step.optimizer, share)
        self._is_finished = True
        self.check_contract()

    # -- a step ------------------------------------------------------------------------------------------------------

    def _forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            return self.module(*args, **kwargs)
        except BaseException as error:
            self._root.reset_iter_state()  # else the next forward would take itself for a part of this one
            if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
                raise ModelError(
                    "a parameter of a unit was read outside a call of that unit, so fully_shard had not gathered it; "
                    "name modules that are called whole by groups=, or use engine=native"
                ) from error
            raise

    @property
    def _root(self) -> FSDPModule:
        return self._units[-1].module

    def _backward(self, loss: Tensor, weight: Weight) -> None:
        self._micro.begin(weight, self._micro_batch)
        self._is_finished = False
        for unit in self._units:
            unit.module.set_reshard_after_backward(self._reshards or self._is_last, recurse=False)
        (loss * self.loss_scale.scale).backward()
        self._micro.end()
        for unit in self._units:
            if self._micro.reduce_dtype_check is not None:
                unit.gradient.check_places()
            unit.gradient.forget()
        if not self._micro.num_reduced and any(unit.num_parameters for unit in self._units):
            raise ModelError(
                f"the backward of {type(self.module).__name__} reduced no gradient: fully_shard finds no tensor in "
                f"what its forward returns; return tensors, or dicts, tuples or dataclasses of them"
            )

    def finish_gradients(self) -> None:
        """Completes the main grads: all reductions of this step have arrived, still scaled and weighted."""
        if self._is_finished:
            return
        self._is_finished = True
        self._micro.complete()
        for unit in self._units:
            unit.gradient.finish()
        self._replicated.finish()
        if (
            self._micro.reduce_dtype_check is not None
            and self.world_size > 1
            and any(unit.num_parameters for unit in self._units)
        ):
            self._micro.reduce_dtype_check.require_complete()
        self._micro.reduce_dtype_check = None

    def _update(self, scalars: UpdateScalars) -> None:
        self._holdings.update(scalars)
        self._refresh()

    def _refresh(self) -> None:
        """The next use of a unit gathers its weights anew."""
        for unit in self._units:
            unit.module.reshard()
        self._replicated.refresh()

    def _clear_gradients(self) -> None:
        for unit in self._units:
            unit.gradient.is_fresh = True

    # -- state -------------------------------------------------------------------------------------------------------

    def owned_shards(self, kind: str) -> Iterator[TensorShard]:
        """This rank's shard of ``kind``, and its share of what all ranks hold."""
        return self._holdings.owned_shards(kind)

    def local_shards(self, kind: str) -> Iterator[TensorShard]:
        """All of ``kind`` that lies on this rank."""
        return self._holdings.local_shards(kind)

    def _check_live(self) -> None:
        self._micro.reduce_dtype_check = ReduceDtypeCheck(self.policy)

    def _check_step(self) -> None:
        super()._check_step()
        for unit in self._units:
            unit.check()
        self._replicated.check()

    def _storages(self) -> dict[str, list[Tensor]]:
        return {
            "master": self._holdings.masters,
            "moments": self._holdings.moments,
            "compute": [*chain.from_iterable(unit.shards for unit in self._units), *self._replicated.replicas],
            "unsharded": list(chain.from_iterable(unit.gathered() for unit in self._units)),
            "main_grad": [*(unit.gradient.main_grad for unit in self._units), *self._replicated.main_grads],
            "unreduced_grad": self._micro.buffers,
        }

    def memory_formula(self) -> dict[str, int]:
        """Bytes on a rank by the ZeRO formula, without padding; FP32 weights beside low ones are whole on each rank.

        Gathered weights are freed between steps at both stages; on CPU a rank keeps its shard of them for the others.
        """
        world_size = self.world_size
        shards = [(unit.num_parameters, unit.dtype.itemsize) for unit in self._units]
        sharded = -(-sum(numel for numel, _ in shards) // world_size)
        held = 4 * (sharded + sum(math.prod(part.shape) for part in self._replicated.holdings))
        kept = sum(numel * size for numel, size in shards) if self._micro.buffers else 0
        replicas = sum(tensor.nbytes for tensor in self._replicated.replicas)
        return {"compute": -(-kept // world_size) + replicas, "main_grad": held, "master": held, "moments": 2 * held}


class _ShardedUnit:
    """One unit under ``fully_shard``, its collectives and its shards.

    Args:
        model: that the unit belongs to.
        unit: its parameters are the model's still.
        mesh: of all ranks.
        micro_batch: shared by all units.
        reshards: whether gathered weights are freed after each use, but for those of the model itself.
    """

    def __init__(
        self, model: nn.Module, unit: Unit, mesh: DeviceMesh, micro_batch: MicroBatch, *, reshards: bool
    ) -> None:
        self._model = model
        self.dtype = unit.dtype
        self.num_parameters = sum(p.numel() for p in unit.parameters.values())
        shapes = unit.shapes
        for parameter in unit.parameters.values():
            parameter.data = parameter.data.float().contiguous()  # the masters' values
        fully_shard(
            unit.module,
            mesh=mesh,
            reshard_after_forward=reshards and unit.module is not model,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=None if unit.dtype == torch.float32 else unit.dtype,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,  # autocast casts what a product takes, and no targets or positions
            ),
            ignored_params=set(model.parameters()) - set(unit.parameters.values()),
        )
        self.module = cast(FSDPModule, unit.module)
        self._parameters = {name: model.get_parameter(name) for name in unit.parameters}
        self._locals = [cast(DTensor, p).to_local().detach().view(-1) for p in self._parameters.values()]
        self.gradient = UnitGradient(unit.name, self._parameters, shapes, micro_batch)
        comm = micro_batch.comm
        self._weights = UnitWeights(unit.name, self.gradient.numel, unit.dtype, comm)
        # so that ranks which use other parameters reduce alike, by sums that nothing divides
        self.module.set_reduce_scatter_unused_params(True, recurse=False)
        self.module.set_force_sum_reduction_for_comms(True)
        self.module.set_custom_reduce_scatter(cast(Any, self.gradient))
        if comm.world_size == 1:
            self.module.set_all_reduce_hook(self.gradient.alone)
        else:
            self.module.set_gradient_divide_factor(1.0)
            self.module.set_custom_all_gather(cast(Any, self._weights))

    def holdings(
        self, rank: int, decayed: Collection[str], shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[LocalShard]:
        """This rank's shard of every parameter."""
        places = zip(self._parameters, self._locals, self.gradient.places(), strict=True)
        for name, master, (offset, width) in places:
            start = min(rank * width, math.prod(shapes[name]))
            main_grad = self.gradient.main_grad[offset : offset + master.numel()]
            yield LocalShard(name, shapes[name], start, master, main_grad, name in decayed, replicated=False)

    def check(self) -> None:
        """Asserts that the parameters are still the shards that the engine updates.

        Raises:
            ContractError: naming the parameter that was replaced.
        """
        for (name, parameter), own in zip(self._parameters.items(), self._locals, strict=True):
            check_in_place(name, parameter, cast(DTensor, parameter).to_local(), own)

    @property
    def shards(self) -> list[Tensor]:
        """This rank's compute weights, where they are kept."""
        return [] if self._weights.shard is None else [self._weights.shard]

    def gathered(self) -> list[Tensor]:
        """The weights that are gathered now."""
        now = (self._model.get_parameter(name) for name in self._parameters)
        return [p.detach() for p in now if not isinstance(p, DTensor)]


def _mesh(comm: Communicator) -> DeviceMesh:
    ensure_group(comm.device)
    return init_device_mesh(comm.device.type, (comm.world_size,))
