"""DeepSpeed ZeRO under dtrain's vote: DeepSpeed shards, gathers and reduces; dtrain votes and computes the update."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.checkpoint.snapshot import TensorShard
from dtrain.distributed.progress import Phase
from dtrain.engine.adapters.deepspeed import config as deepspeed_config
from dtrain.engine.adapters.deepspeed import library as deepspeed_library
from dtrain.engine.adapters.deepspeed.optimizer import Partition, RuleOptimizer
from dtrain.engine.adapters.deepspeed.state import ZeroState, zero_state
from dtrain.engine.interface import Engine
from dtrain.engine.observation import ReduceDtypeCheck
from dtrain.engine.request import EngineRequest
from dtrain.engine.step import StepEngine
from dtrain.errors import ContractError, ModelError, UsageError
from dtrain.optim.rule import UpdateScalars
from dtrain.parameters.compute_shard import ComputeShard
from dtrain.parameters.local_shards import check_in_place
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.parameters.model_states import MAIN_GRAD, MASTER, ModelStates
from dtrain.parameters.running_backward import require_running, running_engine
from dtrain.parameters.squares import sum_squares
from dtrain.parameters.user_hooks import AFTER_ACCUMULATION, call_after_accumulation, hook_last
from dtrain.sharding.layout import ParamSpec
from dtrain.sharding.placement import STAGES, memory_formula


def build(request: EngineRequest) -> Engine:
    """Returns the engine; DeepSpeed manages the model's parameters from then on.

    Raises:
        ConfigError: DeepSpeed was loaded for another kind of device.
        ModelError: a parameter or a compiled module that fails at the stage.
    """
    _check_model(request)
    weights_dtype = deepspeed_config.weights_dtype(request.contract, request.step.zero_stage)
    trained = {name for name, p in request.model.named_parameters() if p.requires_grad}
    replica_dtypes = {
        name: weights_dtype if name in trained else dtype for name, dtype in request.contract.replica_dtypes.items()
    }
    return DeepSpeedEngine(replace(request, contract=replace(request.contract, replica_dtypes=replica_dtypes)))


class DeepSpeedEngine(StepEngine):
    """The step over DeepSpeed's engine.

    A micro-batch's weight multiplies each gradient in the dtype of its parameter, by a hook before those of DeepSpeed
    that reduce. So large weights reduce the usable range of FP16.
    """

    name = "deepspeed"
    keeps_gradients = True

    def __init__(self, request: EngineRequest) -> None:
        model = request.model
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._ds_states = states = DeepSpeedStates(request, self.name, request.step.zero_stage)
        super().__init__(request, states, tuple(reversed(trained)))
        stage = self.options.zero_stage
        self.forward_communicates = stage == 3
        self.library_config = deepspeed_config.generate(request)
        dtypes, numbers = self.contract.replica_dtypes, states.plan.numbers
        for name, parameter in model.named_parameters():
            # DeepSpeed casts none to FP32, and supports row-major parameters only; contiguous() misses strides of
            # dimensions of size 1
            data = parameter.data.float() if dtypes[name] == torch.float32 else parameter.data
            parameter.data = data.reshape(-1).view(parameter.shape)
        # before DeepSpeed rounds the weights and makes its masters from the rounded ones
        originals = self._originals(trained)
        specs = {id(p): ParamSpec(name, tuple(p.shape), dtypes[name], numbers[name]) for name, p in trained.items()}
        self._order: list[int] = []  # numbers of this micro-batch's gradients in the order of backward
        self._weight: Weight  # of this micro-batch
        self._record_gradients(trained)
        self._is_finished = self._has_stepped = False  # of the step under way
        self._reduce_dtype_check: ReduceDtypeCheck | None = None  # until the first step is done
        self._optimizer = states.optimizer = RuleOptimizer(states.plan, trained)
        self._deepspeed = deepspeed_library.start(model, self._optimizer, self.library_config, self.device)
        self._deepspeed._backward_prologue = partial(self._output_reached, self._deepspeed._backward_prologue)
        self._zero = states.zero = zero_state(self._deepspeed, specs)
        if not self._zero.reduces_each:
            self._deepspeed.enable_backward_allreduce = False  # reduced once, at the end of the step
        for shard in states.local_shards(MASTER) if originals else ():
            shard.data.copy_(originals[shard.name][shard.start : shard.stop])
        self._optimizer.add_states(self._zero.partitions)  # only now: an average starts as the master
        states.trained = {name: (p, states.updated_values(p)) for name, p in trained.items()}
        for parameter in trained.values():
            hooks = getattr(parameter, AFTER_ACCUMULATION)
            setattr(parameter, AFTER_ACCUMULATION, None)
            # DeepSpeed's hooks reduce: a later hook of the user's would change what was sent
            hook_last(parameter, partial(call_after_accumulation, hooks))
        self.check_contract()

    def _originals(self, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Returns FP32 copies of weights that DeepSpeed rounds."""
        if self.options.zero_stage == 0 or not self.policy.is_reduced_precision:
            return {}
        return {name: p.detach().to("cpu", torch.float32, copy=True).flatten() for name, p in trained.items()}

    @property
    def timed_phases(self) -> Sequence[Phase]:
        # DeepSpeed's own collectives: in backward and update, and at stage 3 in the forward
        return (Phase.DATA,) if self.options.zero_stage == 3 else (Phase.DATA, Phase.FORWARD)

    def _record_gradients(self, trained: Mapping[str, nn.Parameter]) -> None:
        def record(number: int, grad: Tensor | None) -> Tensor | None:
            if running_engine() is not self:
                self._refuse(self._backward_names[number])
            self._order.append(number)
            if grad is None:  # a backward of the user's own has returned None
                return None
            self.monitor.receive(number)
            weighted = grad if self._weight.is_one else (grad * self._weight.value).to(grad.dtype)
            self.monitor.record_magnitude(number, weighted)
            return weighted

        def record_finiteness(number: int, parameter: Tensor) -> None:
            if parameter.grad is not None:
                self.monitor.record_finiteness(self._batch.number, number, parameter.grad)

        for number, name in enumerate(self._backward_names):
            trained[name].register_hook(partial(record, number))
            # after hooks that are added to the parameter later, and before DeepSpeed's own, which reduces
            trained[name].register_post_accumulate_grad_hook(partial(record_finiteness, number))

    def _refuse(self, name: str) -> None:
        """Raises ``UsageError``: DeepSpeed's own hooks would take a gradient that belongs to no micro-batch."""
        require_running(name)  # [Note: another engine's backward]
        raise UsageError(
            f"'{name}' got a gradient in another engine's backward, which engine=deepspeed cannot ignore; freeze this "
            f"model (d) around the other's forward and backward: 'for p in d.parameters(): p.requires_grad_(False)', "
            f"and back to True before its own forward. The engine whose backward failed is to be built again"
        )

    def _output_reached(self, prologue: Callable[[], None]) -> None:
        """Called before a backward enters the model: DeepSpeed's own preparation is for this engine's backward."""
        if running_engine() is self:
            prologue()
        elif self.options.zero_stage == 3 and torch.is_grad_enabled():
            raise UsageError(
                "torch.autograd.grad(..., create_graph=True) with engine=deepspeed at zero_stage=3, which frees the "
                "weights that the new graph needs; use zero_stage=2 or below, or engine=native or fsdp2"
            )

    @property
    def dummies_need_graph(self) -> bool:
        return self._zero.reduces_each

    # -- the step ----------------------------------------------------------------------------------------------------

    def _call_model(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._deepspeed(*args, **kwargs)

    def _backward(self, loss: Tensor, weight: Weight) -> None:
        if not loss.requires_grad:
            return
        scaled = loss * self.loss_scale.scale
        self._deepspeed.set_gradient_accumulation_boundary(self._batch.current.is_last)
        self._order.clear()
        self._zero.begin_backward()
        self._weight = weight
        with self._observed():
            self._run_backward(scaled)
        if self._zero.reduces_each:
            # DeepSpeed fills its buckets in this order; gloo would sum two different orders silently
            order = zlib.crc32(repr(self._order).encode())
            self.comm.schedule.record("backward", f"{len(self._order)} gradients, their order {order:08x}", scaled)

    def _run_backward(self, loss: Tensor) -> None:
        try:
            self._deepspeed.backward(loss, scale_wrt_gas=False)
        except RuntimeError as error:
            if "returned an invalid gradient" in str(error) and "got [0]" in str(error):
                raise ModelError(
                    "a module has returned a parameter inside a list, dict or object, or kept it, and it was read "
                    "after the module's forward, where DeepSpeed's stage 3 has freed it; return a copy (.clone()), or "
                    "use zero_stage=2 or engine=native"
                ) from error
            raise

    def _observed(self) -> Any:
        check = self._reduce_dtype_check
        if check is None:
            return nullcontext()
        return deepspeed_library.observed_reductions(lambda tensor: check.record("all", tensor))

    def _finish_gradients(self) -> None:
        if self._is_finished:
            return
        with self._observed():
            self._zero.reduce()
        if self._reduce_dtype_check is not None:
            self._reduce_dtype_check.require_complete()
            self._reduce_dtype_check = None
        self._is_finished = True

    def _squares(self) -> Tensor:
        """See the base class; infinite if DeepSpeed's own FP32 norm would overflow, so that no rank updates."""
        squares = (
            sum_squares(self._zero.main_grads()).to(self.device) if self.options.zero_stage else super()._squares()
        )
        limit = torch.finfo(torch.float32).max / (4 * self.world_size)
        return squares.masked_fill(squares.sum() > limit, torch.inf)

    def _update(self, scalars: UpdateScalars) -> None:
        """See the base class; waits for the decision, because DeepSpeed would ignore ``found_inf``.

        This is the exception to [Note: the update is always launched] in ``dtrain.engine.step``.
        """
        if scalars.found_inf.item():
            return
        device = self._zero.partitions[0].master.device  # the host with offload=cpu
        self._optimizer.scalars = scalars.to(device)
        self._has_stepped = True
        self._deepspeed.step()
        if not self._deepspeed.was_step_applied():
            raise ContractError(
                f"DeepSpeed skipped step {self.attempted_steps}, which all ranks had voted to apply; they may have "
                f"diverged, so load a checkpoint"
            )

    def _clear_gradients(self) -> None:
        self._taken.give_back()  # DeepSpeed works on each gradient that it clears
        self._zero.clear(stepped=self._has_stepped)
        self._has_stepped = self._is_finished = False

    def _watch_reductions(self) -> None:
        self._reduce_dtype_check = ReduceDtypeCheck(self.policy)  # rebuilt after each load


class DeepSpeedStates(ModelStates):
    """The states in DeepSpeed's optimizer.

    Attributes:
        zero, optimizer: of the engine, which sets them.
        trained: each trained parameter, and the values that DeepSpeed updates, by name.
    """

    zero: ZeroState
    optimizer: RuleOptimizer
    trained: Mapping[str, tuple[nn.Parameter, Tensor]]

    def refresh(self) -> None:
        self.zero.refresh()

    def release(self) -> None:
        self.zero.release()

    def check_step(self) -> None:
        super().check_step()
        self.check_formats()
        for name, (parameter, weights) in self.trained.items():
            check_in_place(name, parameter, self.updated_values(parameter), weights)

    def updated_values(self, parameter: nn.Parameter) -> Tensor:
        """Returns the values that DeepSpeed updates: the parameter's own, or at stage 3 this rank's shard of them."""
        values: Any = parameter
        return (values.ds_tensor if self.zero_stage == 3 else values).detach()  # type: ignore[no-any-return]

    def owned_shards(self, kind: str) -> Iterator[TensorShard]:
        """Yields this rank's partition of ``kind``; at stage 0, where nothing is sharded, an equal share of each."""
        for shard in self.local_shards(kind):
            if self.zero_stage:
                yield shard
                continue
            start, stop = (shard.stop * rank // self.comm.world_size for rank in (self.comm.rank, self.comm.rank + 1))
            yield shard.part(start, stop)

    def local_shards(self, kind: str) -> Iterator[TensorShard]:
        partitions, dtype = self._partitions(kind), self.saved_dtypes.get(kind, torch.float32)
        for partition, values in zip(partitions, self.held(kind), strict=True):
            flat = values.detach().view(-1)
            for found in partition.intervals:
                data = flat[found.offset : found.offset + found.stop - found.start]
                yield TensorShard(found.spec.name, kind, found.spec.shape, dtype, found.start, found.stop, data)

    def replicated_masters(self) -> Collection[str]:
        return () if self.zero_stage else self.shapes

    def compute_shards(self) -> Iterator[ComputeShard]:
        return self.zero.compute_shards()

    def _partitions(self, kind: str) -> list[Partition]:
        """Returns the partitions whose parameters have ``kind``; those of one partition are of one update class."""
        return [
            p for p in self.zero.partitions if kind in (MASTER, MAIN_GRAD) or kind in self.optimizer.state[p.master]
        ]

    def held(self, kind: str) -> list[Tensor]:
        if kind == MAIN_GRAD:
            return self.zero.main_grads()
        masters = [partition.master for partition in self._partitions(kind)]
        return masters if kind == MASTER else [self.optimizer.state[master][kind] for master in masters]

    @contextmanager
    def whole_frozen(self) -> Iterator[None]:
        """Inside, frozen parameters are whole on every rank; at stage 3 DeepSpeed shards them too."""
        if self.zero_stage < 3 or not self.frozen:
            yield
            return
        import deepspeed

        with self.reads, deepspeed.zero.GatheredParameters(list(self.frozen.values()), modifier_rank=0):
            yield

    def open_weights(self, names: Collection[str]) -> None:
        self.zero.release()

    def unreachable_parameters(self) -> Collection[str]:
        """Returns those that DeepSpeed shards: an empty tensor between uses, or a copy that is not gathered again."""
        return [*self.shapes, *self.frozen] if self.zero_stage == 3 else ()

    def _storages(self) -> dict[str, list[Tensor]]:
        zero = self.zero
        # at stage 3 a parameter is an empty tensor between steps, and its shard lies beside it
        frozen: list[Any] = list(self.frozen.values())
        return {
            "compute": zero.weights(),
            "frozen": [p.ds_tensor if hasattr(p, "ds_tensor") else p for p in frozen],
            "main_grad": zero.gradients(),
            "unsharded": [],
            "unreduced_grad": [],
        }

    def memory_formula(self) -> dict[str, int]:
        """Bytes on a rank by the ZeRO formula in force, without padding and buffers; at stage 0 masters are weights."""
        itemsize = self.contract.policy.compute_dtype.itemsize if self.zero_stage else 0
        return memory_formula(
            STAGES[self.zero_stage],
            numel=self.num_parameters,
            state_bytes=self.state_bytes,
            replica_bytes=self.num_parameters * itemsize,
            frozen_bytes=self.frozen_bytes,
            num_ranks=self.comm.world_size,
        )


def _check_model(request: EngineRequest) -> None:
    model, stage = request.model, request.step.zero_stage
    odd = next((name for name, p in model.named_parameters() if not p.dim() or not p.numel()), None)
    if stage == 3 and odd is not None:
        lacks = "elements" if model.get_parameter(odd).dim() else "dimensions"
        raise ModelError(
            f"'{odd}' has no {lacks}, and DeepSpeed's stage 3 fails on such a parameter; give it the shape [1], "
            f"or use zero_stage=2 or engine=native"
        )
    for name, module in model.named_modules():
        is_wrapped = "_orig_mod" in module._modules  # by torch.compile(module), not module.compile()
        if stage == 3 and is_wrapped:
            raise ModelError(
                f"the module '{name}' is a torch.compile wrapper, which hides its parameters' gathering from "
                f"DeepSpeed's stage 3; use zero_stage=2 or engine=native, or do not compile it"
            )
        if (
            not (is_wrapped or module._compiled_call_impl)
            or not request.contract.policy.is_reduced_precision
            or not stage
        ):
            continue
        full = next((other for other in request.contract.fp32_modules if _overlap(name, other)), None)
        if full is not None:
            raise ModelError(
                f"the module '{name}' is compiled and '{full}' computes in FP32, on copies of the low-precision "
                f"weights that engine=deepspeed holds from stage 1 on; torch.compile does not see them. Compile "
                f"only modules without norms, or use zero_stage=0, precision=fp32 or engine=native"
            )


def _overlap(name: str, other: str) -> bool:
    """Whether one of two modules is the other or lies in it."""
    one, two = name.split(".") if name else [], other.split(".") if other else []
    return all(a == b for a, b in zip(one, two, strict=False))
