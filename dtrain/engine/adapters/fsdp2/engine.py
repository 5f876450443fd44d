"""PyTorch's ``fully_shard`` (FSDP2) under dtrain's contract, reduction, vote and update.

``fully_shard`` unshards weights and calls a reduction when the gradients of a unit are complete. The reduction itself
is dtrain's (``dtrain.engine.adapters.fsdp2.communication``), so that sums are weighted and in FP32.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dtrain.config.engines import FSDP2
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.startup.setup import ensure_process_group
from dtrain.engine.adapters.fsdp2.communication import BackwardState, UnitGradient, UnitWeights, shard_widths
from dtrain.engine.adapters.fsdp2.escapes import require_unkept, watch_escapes
from dtrain.engine.adapters.fsdp2.guests import guard_backward, prepare, reduce_after_backward
from dtrain.engine.adapters.fsdp2.older_torch import complete_reductions, reset_after_error
from dtrain.engine.adapters.fsdp2.replicated import ReplicatedParameters
from dtrain.engine.adapters.fsdp2.units import Unit, plan_units
from dtrain.engine.interface import Engine
from dtrain.engine.observation import ReduceDtypeCheck
from dtrain.engine.parts.parameter_places import replaced
from dtrain.engine.request import EngineRequest
from dtrain.engine.step import StepEngine
from dtrain.errors import ModelError, UsageError
from dtrain.optim.rule import UpdateScalars
from dtrain.parameters.compute_shard import COMPUTE, ComputeShard
from dtrain.parameters.groups import backward_names, find_groups
from dtrain.parameters.local_shards import LocalShard, LocalShards, check_in_place
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.parameters.model_states import LocalStates
from dtrain.sharding.hooks import ModuleHook
from dtrain.sharding.placement import STAGES, memory_formula


def build(request: EngineRequest) -> Engine:
    """Returns the engine; the model's trainable parameters become shards, or views of their masters."""
    return Fsdp2Engine(request)


class Fsdp2Engine(StepEngine):
    """The step over ``fully_shard``.

    Stage 2 keeps weights unsharded until the last backward of a step, stage 3 reshards them after each use.
    """

    name = "fsdp2"
    forward_communicates = True  # at stage 2 too: the first forward after an update gathers

    def __init__(self, request: EngineRequest) -> None:
        model, comm, contract = request.model, request.comm, request.contract
        assert isinstance(request.step.engine, FSDP2)
        groups = find_groups(model, request.step.engine.sharding_units)
        self._fsdp2_states = states = Fsdp2States(request, self.name, request.step.zero_stage)
        super().__init__(request, states, backward_names(groups))
        plan = plan_units(model, groups, contract)
        largest = comm.world_size * max(sum(shard_widths(unit.shapes, comm.world_size)) for unit in plan.units)
        order = {name: number for number, name in enumerate(self._backward_names)}
        self._state = BackwardState(comm, largest, order, self.monitor)
        self._replicated = ReplicatedParameters(
            plan.replicated, contract.replica_dtypes, states.plan.numbers, comm, self._state.take
        )
        self._reshards = request.step.zero_stage == 3
        mesh = _mesh(comm)
        self._units = [_ShardedUnit(model, unit, mesh, self._state, reshards=self._reshards) for unit in plan.units]
        sharded = chain.from_iterable(
            unit.local_shards(comm.rank, states.plan.numbers, states.shapes) for unit in self._units
        )
        states.local = LocalShards([*sharded, *self._replicated.local_shards], states.plan, comm)
        states.units, states.replicated, states.backward_state = self._units, self._replicated, self._state
        self._is_finished = True
        prepare(self._root)
        self.check_contract()

    # -- a step ------------------------------------------------------------------------------------------------------

    def _call_model(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        for unit in self._units:
            unit.follow_user()
        try:
            return self.module(*args, **kwargs)
        except BaseException as error:
            reset_after_error(self._root)  # else fully_shard would treat the next forward as part of this one
            if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
                raise ModelError(
                    "a parameter of a unit was read outside a call of that unit, so fully_shard had not gathered it; "
                    "call the unit itself instead of its forward or another method, name modules that are called "
                    "whole by sharding_units=, or use engine=native"
                ) from error
            raise
        finally:
            for unit in self._units:  # from the first forward on they have unsharded parameters, which the model shows
                unit.follow_user()

    @property
    def _root(self) -> FSDPModule:
        return self._units[-1].module

    def _backward(self, loss: Tensor, weight: Weight) -> None:
        self._state.begin(weight, self._batch.number)
        self._is_finished = False
        is_second_order = self._state.is_second_order
        # stage 2 keeps weights unsharded over the micro-batches of a step
        reshards = self._reshards or self._batch.current.is_last
        for unit in self._units:
            unit.follow_user()
            unit.module.set_reshard_after_backward(reshards and not is_second_order, recurse=False)
            unit.module.set_requires_gradient_sync(True, recurse=False)
        (loss * self.loss_scale.scale).backward()
        if is_second_order:
            reduce_after_backward(self._root)
            self._fsdp2_states.reshard()
        self._state.end()
        for unit in self._units:
            unit.module.set_requires_gradient_sync(False, recurse=False)
            if self._state.reduce_dtype_check is not None:  # once: the layout does not change from step to step
                unit.gradient.check_slots()
            unit.gradient.drop_parameter_grads()
        if not self._state.num_reduced and any(unit.num_parameters for unit in self._units):
            raise ModelError(
                f"the backward of {type(self.module).__name__} reduced no gradient: fully_shard finds no tensor in "
                f"what its forward returns; return tensors, or dicts, tuples or dataclasses of them"
            )

    def _finish_gradients(self) -> None:
        if self._is_finished:
            return
        self._is_finished = True
        self._state.finish_reduction()  # each reduction waits for the one before it, so the last one is enough
        for unit in self._units:
            unit.gradient.finish()
        self._replicated.finish()
        if self._state.reduce_dtype_check is not None and any(unit.num_parameters for unit in self._units):
            self._state.reduce_dtype_check.require_complete()
        self._state.reduce_dtype_check = None

    def _update(self, scalars: UpdateScalars) -> None:
        self._fsdp2_states.local.update(scalars)
        self.states.refresh()

    def _clear_gradients(self) -> None:
        for unit in self._units:
            unit.gradient.is_fresh = True

    def _watch_reductions(self) -> None:
        self._state.reduce_dtype_check = ReduceDtypeCheck(self.policy)


class Fsdp2States(LocalStates):
    """The states of the units, which ``fully_shard`` shards, and of the replicated parameters.

    Attributes:
        units, replicated, backward_state: of the engine, which sets them.
    """

    units: Sequence[_ShardedUnit]
    replicated: ReplicatedParameters
    backward_state: BackwardState

    def refresh(self) -> None:
        self.reshard()  # so that the next use of a unit gathers the updated weights
        self.replicated.refresh()

    def reshard(self) -> None:
        """Reshards all units, which a backward of second order has kept unsharded."""
        is_second_order, self.backward_state.is_second_order = self.backward_state.is_second_order, False
        for unit in self.units:
            unit.reshard()
            if is_second_order:
                unit.module.set_reshard_after_forward(unit.reshards_after_forward, recurse=False)
                unit.module.set_reshard_after_backward(True, recurse=False)

    def replicated_masters(self) -> Collection[str]:
        return {shard.name for shard in self.replicated.local_shards}

    def compute_shards(self) -> Iterator[ComputeShard]:
        for unit in self.units:
            yield from unit.compute_shards(self.comm.rank)
        yield from self.replicated.compute_shards(self.comm.rank)

    def check_step(self) -> None:
        super().check_step()
        for unit in self.units:
            unit.follow_user()
            unit.check()
        self.replicated.check()

    def open_weights(self, names: Collection[str]) -> None:
        for unit in self.units:
            unit.open_weights(bool(names))

    def unsharded_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for unit in self.units for name, p in unit.unsharded_parameters()}

    def unshared_parameters(self) -> Collection[str]:
        return {name for unit in self.units for name in unit.names}

    def _storages(self) -> dict[str, list[Tensor]]:
        return {
            "compute": [*chain.from_iterable(unit.shards for unit in self.units), *self.replicated.replicas],
            "unsharded": list(chain.from_iterable(unit.unsharded() for unit in self.units)),
            "main_grad": [*(unit.gradient.main_grad for unit in self.units), *self.replicated.main_grads],
            "unreduced_grad": self.backward_state.buffers,
            **self.local.storages,
        }

    def memory_formula(self) -> dict[str, int]:
        """Bytes on a rank by the ZeRO formula, without padding.

        FP32 weights in low-precision units and frozen weights are replicated. Unsharded weights are freed between steps
        at both stages; on CPU a rank keeps its shard of the compute weights, which the others read.
        """
        is_held = any(unit.shards for unit in self.units)
        weights = sum(unit.num_parameters * unit.dtype.itemsize for unit in self.units if is_held)
        replicas = sum(tensor.nbytes for tensor in self.replicated.replicas)
        numels = {shard.name: math.prod(shard.shape) for shard in self.replicated.local_shards}
        numel, states, frozen = sum(numels.values()), self.plan.state_bytes(numels), self.frozen_bytes
        whole = memory_formula(STAGES[0], numel=numel, state_bytes=states, replica_bytes=replicas, frozen_bytes=frozen)
        numel, states = self.num_parameters - numel, self.state_bytes - states
        sharded = memory_formula(
            STAGES[3], numel=numel, state_bytes=states, replica_bytes=weights, num_ranks=self.comm.world_size
        )
        return {kind: whole[kind] + sharded[kind] for kind in whole}


def _mesh(comm: Communicator) -> DeviceMesh:
    """Returns a mesh of one dimension over the ranks of ``comm``."""
    if comm.process_group is not None:
        return DeviceMesh.from_group(comm.process_group, comm.device.type)
    ensure_process_group(comm.device)
    return init_device_mesh(comm.device.type, (1,))


class _ShardedUnit:
    """One unit under ``fully_shard``, with its collectives and its shards.

    Args:
        model: the whole model.
        unit: not sharded yet.
        mesh: one dimension, all ranks.
        backward_state: shared by all units.
        reshards: whether weights are resharded after each use.
    """

    def __init__(
        self, model: nn.Module, unit: Unit, mesh: DeviceMesh, backward_state: BackwardState, *, reshards: bool
    ) -> None:
        # not the root: its backward comes next and would gather it again at once
        self.reshards_after_forward = reshards and unit.module is not model
        self.dtype = unit.dtype
        self.num_parameters = sum(p.numel() for p in unit.parameters.values())
        shapes = unit.shapes
        replaced = {id(parameter): name for name, parameter in unit.parameters.items()}
        for parameter in unit.parameters.values():
            parameter.data = parameter.data.float().contiguous()  # FP32, because the shards are the masters
        fully_shard(
            unit.module,
            mesh=mesh,
            reshard_after_forward=self.reshards_after_forward,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=None if unit.dtype == torch.float32 else unit.dtype,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,  # autocast casts the inputs of products, and no targets or positions
            ),
            ignored_params=set(model.parameters()) - set(unit.parameters.values()),
        )
        self.module = cast(FSDPModule, unit.module)
        # without `__deepcopy__`, which wrappers would take for their own
        methods = {"__deepcopy__": None, "__reduce_ex__": _refuse_copy, "_apply": _apply}
        for name, method in methods.items():
            setattr(type(unit.module), name, method)
        # read again: fully_shard has replaced the parameters by DTensors
        self._parameters = {name: model.get_parameter(name) for name in unit.parameters}
        self._locals = [cast(DTensor, p).to_local().detach().view(-1) for p in self._parameters.values()]
        self.gradient = UnitGradient(unit.name, self._parameters, shapes, backward_state)
        comm = backward_state.comm
        self._weights = UnitWeights(unit.name, self.gradient.numel, unit.dtype, comm)
        complete_reductions(self.module)
        self._guests = guard_backward(self.module, unit.parameters, self._parameters, backward_state)
        require_unkept(model, replaced)
        hooked: Any = self.module
        hooked.register_forward_pre_hook(ModuleHook(self._check_places), prepend=True)
        hooked.register_forward_hook(ModuleHook(self._check_places), prepend=True)
        on_returned = self._keep_unsharded if self.reshards_after_forward else None
        watch_escapes(unit.name, self.module, self.unsharded_parameters, on_returned)
        # sums, because weights make the mean
        self.module.set_force_sum_reduction_for_comms(True)
        self.module.set_custom_reduce_scatter(cast(Any, self.gradient))
        if backward_state.is_single_rank:
            self.module.set_all_reduce_hook(self.gradient.on_single_rank)
        else:
            # the one division of a step is in the update
            self.module.set_gradient_divide_factor(1.0)
            self.module.set_custom_all_gather(cast(Any, self._weights))

    def local_shards(
        self, rank: int, update_classes: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[LocalShard]:
        slots = zip(self._parameters, self._locals, self.gradient.slots(), strict=True)
        for name, master, (offset, width) in slots:
            start = min(rank * width, math.prod(shapes[name]))
            main_grad = self.gradient.main_grad[offset : offset + master.numel()]
            yield LocalShard(name, shapes[name], start, master, main_grad, update_classes[name], replicated=False)

    @torch.no_grad()  # else each to_local would record a graph
    def check(self) -> None:
        """Raises ``ContractError`` for a parameter that is no longer the shard that the engine updates."""
        for (name, parameter), own in zip(self._parameters.items(), self._locals, strict=True):
            check_in_place(name, parameter, cast(DTensor, parameter).to_local(), own)

    def follow_user(self) -> None:
        """Takes over what the user has set on a parameter, in one of its two forms."""
        for guest in self._guests:
            guest.follow()

    def reshard(self) -> None:
        """Makes the next use of the unit gather its weights again."""
        self.module.reshard()
        self._weights.is_current = False

    def compute_shards(self, rank: int) -> Iterator[ComputeShard]:
        """Yields this rank's shard of the compute weights, if it is kept and the masters have not changed since."""
        shard = self._weights.shard
        if shard is None or not self._weights.is_current:
            return
        for name, master, (offset, width) in zip(self._parameters, self._locals, self.gradient.slots(), strict=True):
            if master.numel():  # as the gradients, whose layout fully_shard has for the weights too
                values = shard[offset : offset + master.numel()]
                start = rank * width
                yield ComputeShard(name, COMPUTE, start, values, rank, master, is_gathered=False)

    @property
    def shards(self) -> list[Tensor]:
        """This rank's shard of the compute weights, if it is kept between uses."""
        return [] if self._weights.shard is None else [self._weights.shard]

    @property
    def names(self) -> Collection[str]:
        """The names of its parameters."""
        return self._parameters.keys()

    def unsharded_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the tensors that ``fully_shard`` puts in the place of the DTensors, also while they are not there."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        for held in self._fsdp_parameters():
            if hasattr(held, "_unsharded_param"):  # absent before the first forward of the unit
                yield names[id(held.sharded_param)], held._unsharded_param

    def open_weights(self, is_open: bool) -> None:
        """Reshards, so that the model holds the DTensors; then other parameters may stand there while it is open."""
        self.follow_user()
        self.module.reshard()
        for held in self._fsdp_parameters():
            if is_open:  # it runs after each load_state_dict, and would take what stands there for a DTensor
                held.reset_sharded_param = _do_nothing
            else:
                vars(held).pop("reset_sharded_param", None)

    def _check_places(self, *_: Any) -> None:
        """Raises ``UsageError`` for a parameter that a forward has replaced, which ``fully_shard`` would undo."""
        for held in self._fsdp_parameters():
            place = held._module_info
            found = place.module._parameters.get(place.param_name)
            if found is not held.sharded_param and found is not getattr(held, "_unsharded_param", None):
                raise replaced(next(name for name, p in self._parameters.items() if p is held.sharded_param))

    def _keep_unsharded(self) -> None:
        """Lets the weights stay from a forward to its backward."""
        self.reshards_after_forward = False
        self.module.set_reshard_after_forward(False, recurse=False)

    def _fsdp_parameters(self) -> Sequence[Any]:
        state: Any = self.module._get_fsdp_state()
        group = state._fsdp_param_group
        return () if group is None else group.fsdp_params

    def unsharded(self) -> list[Tensor]:
        places = (held._module_info for held in self._fsdp_parameters())
        now = (place.module._parameters[place.param_name] for place in places)
        return [p.detach() for p in now if not isinstance(p, DTensor)]


def _do_nothing() -> None:
    pass


def _apply(module: FSDPModule, *args: Any, **kwargs: Any) -> Any:
    """Converts as ``.to()`` does, which looks into the parameters: [Note: guarded parameters]."""
    reads = (getattr(parameter, "reads", None) for parameter in cast(nn.Module, module).parameters())
    with next((found() for found in reads if found is not None), None) or nullcontext():
        return FSDPModule._apply(module, *args, **kwargs)


def _refuse_copy(module: nn.Module, *_: Any) -> NoReturn:
    raise UsageError(
        f"a copy of {type(module).__name__.removeprefix('FSDP')}, whose weights fully_shard has sharded; take `with "
        f"engine.full_model():`, which gives a whole copy, or engine.master_state()"
    )
