"""The model and the optimizer that ``accelerator.prepare`` returns: thin objects over an engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn

from dtrain.engine.interface import Engine
from dtrain.engine.outcome import StepOutcome
from dtrain.errors import UsageError
from dtrain.integrations.driver import NO_LOCAL_STEPS, EngineDriver

_NOT_PREPARED = (
    "training a prepared model whose optimizer is not prepared, so that it has no engine; call "
    "accelerator.prepare(model, optimizer) with both, or model.eval()"
)


class PreparedModel(nn.Module):
    """A model whose forward is an engine's. Other attributes are the user's module's.

    Until its optimizer is prepared it has no engine, and a backward of its output is an error.

    Args:
        module: the user's model.
        autocast_dtype: dtype in which it computes while it has no engine; None: its own.

    Attributes:
        module: see above.
        driver: runs the engine; None before the optimizer is prepared.
    """

    def __init__(self, module: nn.Module, autocast_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self.driver: EngineDriver | None = None
        self._autocast_dtype = autocast_dtype
        self._is_accelerate_prepared = True

    @property
    def engine(self) -> Engine:
        """The engine; raises ``UsageError`` before the optimizer is prepared."""
        if self.driver is None:
            raise UsageError(
                "this model has no engine, because its optimizer is not prepared; call accelerator.prepare(optimizer)"
            )
        return self.driver.engine

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # before it is set
                raise
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the engine's forward: training if gradients are on; else, in eval mode, an evaluation.

        Returns:
            What the model returns. As with accelerate, 16-bit tensors in it are cast to FP32.
        """
        if self.driver is not None:
            output = self.driver.forward(*args, **kwargs)
            return _in_fp32(output) if self.engine.contract.is_mixed else output
        device = next((p.device.type for p in self.module.parameters()), "cpu")
        low = nullcontext() if self._autocast_dtype is None else torch.autocast(device, self._autocast_dtype)
        with low:
            output = self.module(*args, **kwargs)
        output = output if self._autocast_dtype is None else _in_fp32(output)
        if self.training and torch.is_grad_enabled() and any(p.requires_grad for p in self.module.parameters()):
            return _without_backward(output)
        return output

    def no_sync(self) -> AbstractContextManager[None]:
        """Context of backwards that are not the last of their step, as of DistributedDataParallel.

        Raises:
            UsageError: accelerate's ``LocalSGD`` enters it, in order to take steps inside.
        """
        if sys._getframe(1).f_globals.get("__name__") == "accelerate.local_sgd":
            raise UsageError(f"accelerate.local_sgd.LocalSGD cannot be kept: {NO_LOCAL_STEPS}")
        return nullcontext() if self.driver is None else self.driver.unsynchronized()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing, because each step clears its gradients; refused where they would be discarded."""
        if self.driver is not None:
            _refuse_discard(self.driver)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the whole weights on every rank; trained ones are FP32 masters. All ranks call."""
        module = self.module if self.driver is None else self.engine.module
        return module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads whole weights into the masters; all ranks call, with the same ones."""
        if self.driver is None:
            return self.module.load_state_dict(state_dict, strict=strict)
        self.driver.close()
        with self.engine.modify_weights():
            return self.module.load_state_dict(state_dict, strict=strict)


def _in_fp32(output: Any) -> Any:
    """Casts 16-bit tensors in ``output``, except a loss with a graph, which ``backward`` must see as it is."""

    def is_cast(value: Any) -> bool:
        is_16_bit = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return is_16_bit and (value.dim() > 0 or not value.requires_grad)

    return recursively_apply(Tensor.float, output, test_type=is_cast)


def _without_backward(output: Any) -> Any:
    """Makes a backward of ``output`` raise, because its gradients would be this rank's alone."""
    seen: list[Tensor] = []

    def refuse(gradient: Tensor) -> None:
        raise UsageError(_NOT_PREPARED)

    def watch(value: Tensor) -> Tensor:
        seen.append(value)
        if value.grad_fn is not None:  # a parameter that is returned would keep the hook
            value.register_hook(refuse)
        return value

    recursively_apply(watch, output)
    if not seen:  # in an object of the model's own
        raise UsageError(_NOT_PREPARED)
    return output


def _refuse_discard(driver: EngineDriver) -> None:
    if driver.has_backward:
        raise UsageError(
            "zero_grad() between accelerator.backward and optimizer.step() would discard the gradients of this step, "
            "which dtrain cannot: ranks have reduced them already; call it after optimizer.step(). A step with a loss "
            "or gradient that is not finite is skipped without it"
        )


class PreparedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # accelerate has no types
    """An optimizer of torch whose ``step`` is an engine's; its parameter groups give the learning rate.

    It has an engine once its model is prepared too.

    Args:
        optimizer: the user's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._driver: EngineDriver | None = None
        self.outcome: StepOutcome | None = None
        self._is_accelerate_prepared = True

    @property
    def has_engine(self) -> bool:
        """Whether its model is prepared too."""
        return self._driver is not None

    @property
    def driver(self) -> EngineDriver:
        """Runs the engine; raises ``UsageError`` before the model is prepared."""
        if self._driver is None:
            raise UsageError(
                f"this {type(self.optimizer).__name__} has no engine, because no prepared model has its parameters; "
                f"call accelerator.prepare(model, optimizer) with both"
            )
        return self._driver

    @driver.setter
    def driver(self, driver: EngineDriver) -> None:
        self._driver = driver

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Takes the engine's step if gradients are synchronized now, else nothing."""
        if closure is not None:
            raise UsageError(
                "optimizer.step(closure): dtrain runs forward and backward once a step; call "
                "accelerator.backward(loss) and optimizer.step()"
            )
        if self.gradient_state.sync_gradients:
            self.outcome, self._is_overflow = self.driver.step(), False

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Does nothing, because each step clears its gradients; refused where they would be discarded."""
        if self.gradient_state.sync_gradients:
            _refuse_discard(self.driver)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step updated nothing; on a GPU this waits for it.

        A script may set ``_is_overflow``, accelerate's mark of a skipped step, which holds until the next step.
        """
        return self._is_overflow or (self.outcome is not None and not self.outcome.applied)

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Raises ``UsageError``: the engine's parameters are fixed."""
        raise UsageError("add_param_group after accelerator.prepare: the parameters are sharded; add groups before it")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the parameter groups; the states are in the engine's own checkpoint."""
        if state_dict.get("state"):
            raise UsageError(
                "this optimizer state was saved without dtrain; resume from a folder of this Accelerator's save_state"
            )
        self.optimizer.load_state_dict(state_dict)
