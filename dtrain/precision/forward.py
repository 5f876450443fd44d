"""How a forward runs under a contract: autocast, regions of other formats inside, and outputs that are never low."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dtrain.precision import autocast_ops
from dtrain.precision.contract import Contract
from dtrain.precision.float8.linear import convert
from dtrain.precision.policy import HELD, PrecisionPolicy
from dtrain.precision.regions import is_exempt
from dtrain.precision.rules import OWN_FORWARD

REDUCED_SUMS = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
"""Of ``torch.backends.cuda.matmul``: where products may be summed in 16 bits, which two of them allow by default."""


_REGION = "region_dtype"  # of a replaced forward


class Autocast:
    """Installs a contract's forward rules on a model.

    Autocast alone would run an FP32 Linear in BF16, so the forward of every FP32 module runs with autocast off and its
    floating inputs cast; and it leaves softmax and norms low on CPU, which :mod:`dtrain.precision.autocast_ops` mends.
    Where an engine holds their weights low, they compute on FP32 copies. A module of another 16-bit format than what is
    round it runs under autocast of that format, and what it returns is cast back; a norm, softmax or loss that a rule
    makes low, which autocast would run in FP32, runs without it, on inputs and weights cast. Linears whose products are
    FP8 become :class:`~dtrain.precision.float8.linear.Float8Linear`, which casts the weights that it finds until an
    engine gives it a source of its own.
    """

    def __init__(self, contract: Contract, model: nn.Module, device: torch.device) -> None:
        self._policy = contract.policy
        self._is_mixed = contract.is_mixed
        self._device_type = device.type
        recipe = contract.recipe
        for name in contract.float8_modules:
            linear = model.get_submodule(name)
            assert recipe is not None
            assert isinstance(linear, nn.Linear)
            convert(linear, recipe)
        # the modules inside are regions too: a ModuleList has no forward of its own, and a caller may reach past it
        for name, dtype in contract.regions.items():
            module = model.get_submodule(name)
            if dtype == torch.float32:
                _run_in_fp32(module, device.type, casts_weights=contract.weights == "compute")
            elif name in contract.forced:
                _run_forced(module, device.type, dtype)
            else:
                _run_in_reduced_precision(module, device.type, dtype)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The context that a forward runs in."""
        low = self._policy.is_reduced_precision
        with (
            torch.autocast(self._device_type, dtype=self._policy.compute_dtype) if low else nullcontext(),
            self.backward(),
        ):
            yield

    def backward(self) -> AbstractContextManager[None]:
        """The context that a backward runs in."""
        return autocast_ops.enabled(self._device_type) if self._is_mixed else nullcontext()

    def cast_output(self, output: Any) -> Any:
        """``output`` with its floating tensors in the output dtype, unless it carries a loss already.

        0-dim tensors stay as they are: a loss that was computed low must be refused, not dressed up.
        """
        if not self._is_mixed or find_loss(output) is not None:
            return output
        return _cast_low(output, self._policy.output_dtype)


def find_loss(output: Any) -> Tensor | None:
    """The loss inside a model's output: the 0-dim tensor itself, ``output["loss"]`` or ``output.loss``, else None."""
    if isinstance(output, Tensor):
        return output if output.dim() == 0 else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 else None


def set_matmul_precision(policy: PrecisionPolicy) -> None:
    """Sets the process-wide modes of products: TF32 only where the policy is, and sums in FP32 always."""
    torch.set_float32_matmul_precision("high" if policy.tf32 else "highest")
    cudnn: Any = torch.backends.cudnn
    cudnn.allow_tf32 = policy.tf32
    # without an answer of their own the two would follow torch.backends.fp32_precision, whatever that was set to
    for operator in (cudnn.conv, cudnn.rnn):
        operator.fp32_precision = "tf32" if policy.tf32 else "ieee"
    matmul: Any = torch.backends.cuda.matmul
    for name in REDUCED_SUMS:
        setattr(matmul, name, False)


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward of ``module`` as a function of the module, so that a deep copy of it runs its own weights."""
    own = module.forward
    return own.__func__ if isinstance(own, MethodType) else lambda _, *args, **kwargs: own(*args, **kwargs)


def _run_in_fp32(module: nn.Module, device_type: str, *, casts_weights: bool) -> None:
    original = _own_forward(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(autocast_ops.to_fp32, (args, kwargs))
        weights = _weights_in(self, torch.float32) if casts_weights else nullcontext()
        with torch.autocast(device_type, enabled=False), weights:
            return original(self, *args, **kwargs)

    _replace_forward(module, forward)


def _run_in_reduced_precision(module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    original = _own_forward(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_exempt(device_type):  # code says FP32 here, and a rule does not know that
            return original(self, *args, **kwargs)
        outer = autocast_dtype(device_type)
        args, kwargs = _cast_low((args, kwargs), dtype)
        # no cache: a weight that two modules share may have been cast to the other's format
        with torch.autocast(device_type, dtype=dtype, cache_enabled=False):
            output = original(self, *args, **kwargs)
        return _cast_low(output, outer)

    vars(forward)[_REGION] = dtype
    _replace_forward(module, forward)


def _run_forced(module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    original = _own_forward(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_exempt(device_type):
            return original(self, *args, **kwargs)
        outer = autocast_dtype(device_type)
        args, kwargs = pytree.tree_map(partial(_cast, dtype=dtype), (args, kwargs))
        # a batch norm takes FP32 weights with low inputs, because its running statistics are FP32
        weights = torch.float32 if isinstance(self, nn.modules.batchnorm._BatchNorm) else dtype
        with torch.autocast(device_type, enabled=False), _weights_in(self, weights):
            output = original(self, *args, **kwargs)
        # a loss is FP32 for what is round it: here the rule with its name says that it was computed low
        return pytree.tree_map(lambda value: _cast(value, outer if _has_dim(value) else torch.float32), output)

    vars(forward)[_REGION] = dtype
    _replace_forward(module, forward)


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    vars(forward)[OWN_FORWARD] = getattr(module.forward, "__func__", module.forward)
    module.forward = MethodType(forward, module)


def autocast_dtype(device_type: str) -> torch.dtype:
    """Of products here: the dtype of autocast, and FP32 where that is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else torch.float32


def reduced_precision_region(module: nn.Module) -> torch.dtype | None:
    """The 16-bit format that :class:`Autocast` has made ``module`` run in, where that differs from what is round it."""
    return getattr(module.forward, _REGION, None)


def _cast_low(values: Any, dtype: torch.dtype) -> Any:
    """``values`` with what is BF16 or FP16 in them in ``dtype``; 0-dim tensors, which may be losses, stay."""

    def cast(value: Any) -> Any:
        is_reduced_precision = _has_dim(value) and value.dtype in (torch.bfloat16, torch.float16)
        return value.to(dtype) if is_reduced_precision else value

    return pytree.tree_map(cast, values)


def _has_dim(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """``value``, in ``dtype`` where it is a tensor that computes in 16 or 32 bits."""
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype in HELD else value


@contextmanager
def _weights_in(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, ``module`` and all in it read their weights in ``dtype``; gradients flow back through the copies."""
    replaced = [(part, part._parameters) for part in module.modules() if not isinstance(part._parameters, _CastView)]
    flat = [(part, part._flat_weights) for part, _ in replaced if isinstance(part, nn.RNNBase)]
    try:
        for part, parameters in replaced:
            part._parameters = _CastView(parameters, dtype)
        for rnn, weights in flat:
            rnn._flat_weights = [_cast(weight, dtype) for weight in weights]
        yield
    finally:
        for part, parameters in replaced:
            part._parameters = parameters
        for rnn, weights in flat:
            rnn._flat_weights = weights


class _CastView(dict[str, Any]):
    """A module's parameters, cast when they are read: not before, for a library may gather them then."""

    def __init__(self, parameters: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(parameters)
        self._original = parameters
        self._dtype = dtype

    def __getitem__(self, name: str) -> Any:
        return _cast(self._original[name], self._dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)  # that library's own, on its kind of dict
