"""An ``Accelerator`` of Hugging Face accelerate that trains with dtrain's engines.

::

    from dtrain.integrations.accelerate import Accelerator

    accelerator = Accelerator(engine=dtrain.Native(zero_stage=2), mixed_precision="bf16")
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

The rest of a script that was written for accelerate stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from accelerate.utils.dataclasses import FP8BackendType
from torch import Tensor, nn

from dtrain.config.engines import EngineConfig
from dtrain.distributed.logging import logger
from dtrain.distributed.startup.setup import read_launch_env
from dtrain.distributed.transport.own_groups import close_at_exit
from dtrain.engine.release import current
from dtrain.engine.vote.losses import refuse_options
from dtrain.errors import ConfigError, UsageError
from dtrain.integrations.build import build, end_engine_of, model_of
from dtrain.integrations.checkpoints import SavedByEngine, load_engines, save_engines
from dtrain.integrations.driver import EngineDriver
from dtrain.integrations.graph import driver_of
from dtrain.integrations.prepared import PreparedModel, PreparedOptimizer
from dtrain.integrations.replayed_order import count_epoch, make_replayable, orders, restore_orders
from dtrain.integrations.settings import (
    ENGINE_OPTIONS,
    autocast_dtype,
    check_options,
    mixed_precision_of,
    resolve_precision,
    take_engine,
)
from dtrain.integrations.weights import whole_state_dict
from dtrain.precision.policy import PrecisionPolicy


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # accelerate has no types
    """``accelerate.Accelerator`` with an engine of dtrain for each model that is prepared with its optimizer.

    Data loaders, schedulers, ``gather``, ``gather_for_metrics``, trackers and ``register_for_checkpointing`` are
    accelerate's own. Its process group is used; the model is never wrapped in DDP, and no gradient scaler is made.
    So buffers, such as running statistics of BatchNorm, are each rank's own, and ``model.eval()`` asks no other rank:
    ``model.engine.copy_buffers()`` on all ranks gives them rank 0's before an evaluation that they share. DDP, in which
    accelerate wraps the model, broadcasts them in each forward.

    Args:
        engine: an engine's record, or its name, whose fields may then be given too, such as ``zero_stage=2``; see
            ``dtrain.initialize``.
        precision: as for ``dtrain.initialize``; None: that of ``mixed_precision`` (``no`` is ``fp32``).
        mixed_precision: ``no``, ``bf16``, ``fp16`` or ``fp8``; None: that of the variable
            ``ACCELERATE_MIXED_PRECISION``, else of ``precision``.
        **options: other arguments of accelerate's Accelerator, and those in
            ``dtrain.integrations.settings.ENGINE_OPTIONS``: of ``dtrain.initialize``. ``max_grad_norm`` is None
            by default: ``clip_grad_norm_`` sets the threshold of a step. ``optimizer`` is a record such as
            ``dtrain.Muon()`` that updates in the place of the prepared optimizer, which then gives the learning rate.

    Raises:
        ConfigError: arguments or environment variables that choose another backend, or contradict each other.
    """

    def __init__(
        self,
        *,
        engine: str | EngineConfig = "native",
        precision: str | torch.dtype | PrecisionPolicy | None = None,
        mixed_precision: str | None = None,
        **options: Any,
    ) -> None:
        check_options(options)
        engine = take_engine(engine, options)
        self.policy = resolve_precision(mixed_precision, precision)
        chosen = {name: options.pop(name) for name in ENGINE_OPTIONS if name in options}
        self._engine_options = {"engine": engine, "precision": self.policy, "max_grad_norm": None, **chosen}
        self._saves_for_hooks: bool | None = None  # while save_state runs: whether hooks see the weights
        # accelerate would wrap forwards in autocast, and scale losses, in any other precision than this
        has_group = dist.is_initialized()
        super().__init__(mixed_precision="no", **options)
        if not has_group:
            close_at_exit(dist.group.WORLD)  # accelerate destroys it in ``end_training`` only
        ranks = read_launch_env().world_size
        if self.num_processes == 1 < ranks:
            raise ConfigError(
                f"a launcher has started {ranks} ranks and accelerate uses one; on ranks without a GPU give "
                f"Accelerator(cpu=True)"
            )
        known = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
        if self.distributed_type not in known:
            raise ConfigError(
                f"accelerate's state is of {self.distributed_type}; expected one of one rank, CPUs or GPUs: start the "
                f"process again without the other backend"
            )
        if self.num_processes > 1 and not self.even_batches and self.is_main_process:
            logger.warning(
                "even_batches=False: ranks may get different numbers of batches, and one with more of them waits for "
                "the others until the time-out; train with even_batches=True"
            )

    @property
    def mixed_precision(self) -> str:
        """The precision, by accelerate's name."""
        return mixed_precision_of(self.policy)

    @property
    def fp8_backend(self) -> FP8BackendType:
        """No backend of accelerate's, because FP8 is dtrain's own."""
        return FP8BackendType("NO")

    # -- prepare -----------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepares models, optimizers, data loaders and schedulers, and returns them in the same order.

        A model and the optimizer of its parameters, given in one call or two, get one engine.

        Raises:
            ConfigError: an optimizer of several models, or what ``dtrain.initialize`` refuses.
        """
        found: dict[int, Any] = {}
        for index, one in enumerate(args):
            if isinstance(one, nn.Module):
                found[index] = self.prepare_model(one)
        for index, one in enumerate(args):
            if isinstance(one, torch.optim.Optimizer):
                found[index] = self.prepare_optimizer(one)
        return super().prepare(
            *(found.get(index, one) for index, one in enumerate(args)), device_placement=device_placement
        )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Returns the model on its device; it can train once its optimizer is prepared.

        An engine that another Accelerator has built for the model ends, and the model keeps its weights.
        """
        models: list[PreparedModel] = self._models
        for known in models:
            if model is known or model is known.module:
                return known
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ConfigError("the model is wrapped in DDP; give the model itself to accelerator.prepare")
        if not isinstance(model, PreparedModel):
            end_engine_of(model)
            # accelerate's own, which refuses models that it cannot place, and wraps none that is only evaluated
            model = super().prepare_model(model, device_placement, evaluation_mode=True)
            models.pop()
            model = PreparedModel(model, autocast_dtype(self.policy))
        models.append(model)
        for optimizer in self._optimizers:
            self._build(optimizer)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Builds the engine of the prepared model that has the optimizer's parameters, now or once it is prepared."""
        if not isinstance(optimizer, PreparedOptimizer):
            optimizer = PreparedOptimizer(optimizer)
        if not any(optimizer is known for known in self._optimizers):
            self._build(optimizer)
            self._optimizers.append(optimizer)
        return optimizer

    def _build(self, optimizer: PreparedOptimizer) -> None:
        """Gives ``optimizer`` an engine if it has none and its model is prepared."""
        if optimizer.has_engine:
            return
        for group in optimizer.param_groups:  # it may have been made while an earlier engine had the model
            group["params"] = [current(one) for one in group["params"]]
        model = model_of(optimizer.optimizer, self._models)
        if model is not None:
            optimizer.driver = build(model, optimizer.optimizer, self.device, self._engine_options)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepares a loader as accelerate does; the random order of an epoch can be drawn again after a resume."""
        loader = super().prepare_data_loader(data_loader, *args, **kwargs)
        make_replayable(loader)
        return loader

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Skips batches as accelerate does; the rest of the epoch counts as one of ``dataloader``."""
        return count_epoch(super().skip_first_batches(dataloader, num_batches), dataloader)

    @property
    def _drivers(self) -> list[EngineDriver]:
        return [model.driver for model in self._models if model.driver is not None]

    # -- the step ----------------------------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Adds gradients up, as in accelerate, until ``gradient_accumulation_steps`` backwards or the last batch."""
        for driver in self._drivers:
            driver.end_round()
        with super().accumulate(*models):
            yield

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Holds backwards of ``model`` that are not the last of their step."""
        with model.no_sync() if isinstance(model, PreparedModel) else nullcontext():
            yield

    def backward(
        self, loss: Any, *, weight: float | Tensor | None = None, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Runs the backward of ``loss``, an FP32 mean over this rank's batch.

        The step adds the gradients of its backwards, divides by ``gradient_accumulation_steps`` and averages over the
        ranks, as with accelerate. With weights it averages over all backwards of all ranks by their weights instead.

        Args:
            loss: a 0-dim FP32 tensor.
            weight: of this loss in the global mean, such as its number of tokens; all backwards of a step have one.
            model: the prepared model that is updated, if ``loss`` depends on several.
            **kwargs: other arguments of ``Tensor.backward``, which are refused unless they are off.

        Raises:
            UsageError: no engine, or several, could be meant; or as ``dtrain.Engine.backward``.
        """
        refuse_options(kwargs, "accelerator.backward")
        driver_of(loss, model, self._drivers).backward(loss, weight)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Lets the next step of the parameters' engine clip its gradient to the global norm ``max_norm``.

        Returns:
            0-dim FP32 tensor, NaN until ``optimizer.step`` has run, then the norm before clipping.

        Raises:
            UsageError: another norm, or parameters that are not all of one prepared model's.
        """
        if float(norm_type) != 2.0:
            raise UsageError(f"clip_grad_norm_(norm_type={norm_type}): an engine clips the 2-norm of all gradients")
        if not max_norm > 0:
            raise UsageError(f"clip_grad_norm_(max_norm={max_norm}): expected a number above 0")
        given = {id(parameter) for parameter in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        for driver in self._drivers:
            own = list(driver.engine.module.parameters())
            trained = {id(parameter) for parameter in own if parameter.requires_grad}
            if trained and trained <= given <= {id(parameter) for parameter in own}:
                return driver.clip(float(max_norm))
        raise UsageError(
            "clip_grad_norm_ of parameters that are not all of one prepared model's: an engine clips the norm of its "
            "whole gradient; give model.parameters()"
        )

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> NoReturn:
        """Raises ``UsageError``: no rank holds the whole gradient."""
        raise UsageError(
            "clip_grad_value_: gradients are reduced sums, sharded and still scaled, when backward ends; use "
            "clip_grad_norm_, which the engine does in its step"
        )

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Does nothing: a step unscales its gradient before it clips."""

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Does nothing: a prepared model computes in its precision, and what follows it in FP32."""
        yield

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Does as accelerate's on a single rank; raises on several, which take the same number of steps."""
        if self.num_processes > 1:
            raise UsageError(
                "join_uneven_inputs: all ranks of an engine take the same number of steps; leave it out, and keep "
                "even_batches=True, which gives every rank as many batches"
            )
        yield

    # -- weights and checkpoints -------------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Waits for all ranks; if one reads weights meanwhile, which gathers them, both are told so."""
        for engine in (driver.engine for driver in self._drivers):
            _ = engine.applied_steps  # [Note: finalize before the next collective]
            with engine.comm.schedule.method("wait_for_everyone"):
                engine.comm.barrier()
        super().wait_for_everyone()

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Returns the user's module, whose weights read as FP32 masters.

        If its weights are not the masters themselves (they are sharded, in 16 bits or in FP8), a read of values gathers
        all masters on every rank, once between two calls of the model or optimizer, so all ranks read together; see
        ``dtrain.Engine.guard_reads``. Shapes and dtypes gather nothing. A forward of the module computes in the
        model's precision.
        """
        unwrapped: nn.Module = super().unwrap_model(_bare(model), *args, **kwargs)
        return unwrapped

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Returns the whole weights on rank 0, {} elsewhere; all ranks call. Trained ones are the FP32 masters."""
        driver = next(
            (d for d in self._drivers if model is d.engine.module or d is getattr(model, "driver", None)), None
        )
        if driver is None:
            state: dict[str, Any] = super().get_state_dict(self.unwrap_model(model))
            return state
        if self._saves_for_hooks is not None and not unwrap:  # accelerate's save_state asks for wrapped ones
            return SavedByEngine(whole_state_dict(driver.engine) if self._saves_for_hooks else {})
        return whole_state_dict(driver.engine)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Registers a hook, as in accelerate, that gets the users' modules, and on rank 0 their whole weights."""

        def call(models: list[nn.Module], weights: list[Any], folder: str) -> None:
            hook([_bare(model) for model in models], weights, folder)

        return super().register_save_state_pre_hook(call)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Registers a hook, as in accelerate, that gets the users' modules with whole weights, which it may write."""

        def call(models: list[nn.Module], folder: str) -> None:
            prepared = {id(_bare(model)): model for model in models}
            models[:] = [_bare(model) for model in models]
            with ExitStack() as stack:
                for driver in self._drivers:
                    driver.close()
                    stack.enter_context(driver.engine.modify_weights())
                hook(models, folder)
            models[:] = [prepared.get(id(model), model) for model in models]

        return super().register_load_state_pre_hook(call)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Saves everything to a folder; all ranks call.

        Weights and optimizer states are checkpoints of dtrain in it, which any number of ranks and any engine loads.
        Schedulers, samplers, random states and registered objects are accelerate's own files.
        """

        def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
            save_engines(self._drivers, Path(folder), {"step": self.step, "orders": orders(self._dataloaders)})
            weights[:] = [own for own in weights if not isinstance(own, SavedByEngine)]

        self._saves_for_hooks = bool(self._save_model_state_pre_hook)
        # registered last, so that the user's own hooks have been called
        handle = super().register_save_state_pre_hook(save)
        try:
            saved = super().save_state(output_dir, safe_serialization, **options)
            self.wait_for_everyone()  # so that a rank that loads finds the files of all
            return saved
        finally:
            self._saves_for_hooks = None
            handle.remove()

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any) -> None:
        """Restores what ``save_state`` wrote; all ranks call, also on another number of ranks."""
        extras: list[dict[str, Any]] = []

        def load(models: list[nn.Module], folder: str) -> None:
            extras.extend(load_engines(self._drivers, Path(folder)))
            models[:] = [model for model in models if getattr(model, "driver", None) is None]

        handle = super().register_load_state_pre_hook(load)
        try:
            super().load_state(input_dir, load_kwargs, **options)
        finally:
            handle.remove()
        if extras:  # accelerate's own is missing for ranks that did not save
            self.step = int(extras[0]["step"])
            restore_orders(self._dataloaders, extras[0].get("orders", ()))


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, PreparedModel) else model
