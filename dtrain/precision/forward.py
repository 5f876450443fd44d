"""Runs a forward under a contract: autocast, modules in other formats, and FP32 outputs."""

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
from dtrain.precision.policy import TRAINABLE_DTYPES, PrecisionPolicy
from dtrain.precision.regions import in_full_precision_region
from dtrain.precision.rules import OWN_FORWARD

REDUCED_SUMS = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
"""Flags of ``torch.backends.cuda.matmul`` that allow sums in 16 bits; two of them are on by default."""

_REGION = "region_dtype"  # attribute of a replaced forward


class Autocast:
    """Installs a contract's forward rules on a model.

    - An FP32 module runs with autocast off and its floating inputs cast, because autocast alone would run an FP32
      Linear in BF16. If the engine stores its weights in reduced precision, it computes on FP32 copies.
    - A module in another 16-bit format than the modules around it runs under autocast of its format; its outputs are
      cast back.
    - A norm, router, softmax or loss that a rule puts in reduced precision runs without autocast, which would choose
      FP32, on cast inputs and weights.
    - FP8 Linears become ``dtrain.precision.float8.linear.Float8Linear``. They cast their parameter until the
      engine sets another weight source.
    - Operations that the device's autocast does not cover: see ``dtrain.precision.autocast_ops``.
    """

    def __init__(self, contract: Contract, model: nn.Module, device: torch.device) -> None:
        self._policy = contract.policy
        self._is_mixed = contract.is_mixed
        self._device_type = device.type
        for name in contract.float8_modules:
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            convert(linear, contract.recipe_of(name))
        # children of a region are regions too: a ModuleList has no forward, and code may call a child directly
        for name, dtype in contract.regions.items():
            module = model.get_submodule(name)
            if dtype == torch.float32:
                _run_in_fp32(module, device.type, casts_weights=contract.weights == "compute")
            elif name in contract.fp32_class_overrides:
                _run_fp32_class_in(module, device.type, dtype)
            else:
                _run_in_reduced_precision(module, device.type, dtype)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        is_reduced = self._policy.is_reduced_precision
        with (
            torch.autocast(self._device_type, dtype=self._policy.compute_dtype) if is_reduced else nullcontext(),
            self.backward(),
        ):
            yield

    def backward(self) -> AbstractContextManager[None]:
        return autocast_ops.enabled(self._device_type) if self._is_mixed else nullcontext()

    def cast_output(self, output: Any) -> Any:
        """Casts the reduced-precision tensors of ``output`` to the output dtype, unless it contains a loss.

        0-dim tensors keep their dtype, so that a loss computed in reduced precision is still detected.
        """
        if not self._is_mixed or find_loss(output) is not None:
            return output
        return _cast_reduced_precision(output, self._policy.output_dtype)


def find_loss(output: Any) -> Tensor | None:
    """Returns the loss in a model's output: the 0-dim tensor itself, ``output["loss"]`` or ``output.loss``, or None."""
    if isinstance(output, Tensor):
        return output if output.dim() == 0 else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 else None


def set_matmul_precision(policy: PrecisionPolicy) -> None:
    """Sets the process-wide matmul modes: TF32 only if the policy asks for it, and sums always in FP32."""
    torch.set_float32_matmul_precision("high" if policy.tf32 else "highest")
    cudnn: Any = torch.backends.cudnn
    cudnn.allow_tf32 = policy.tf32
    # set explicitly, because they default to torch.backends.fp32_precision
    for operator in (cudnn.conv, cudnn.rnn):
        operator.fp32_precision = "tf32" if policy.tf32 else "ieee"
    matmul: Any = torch.backends.cuda.matmul
    for name in REDUCED_SUMS:
        setattr(matmul, name, False)


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """Returns the forward of ``module`` unbound, so that a deep copy of the module uses its own weights."""
    own = module.forward
    return own.__func__ if isinstance(own, MethodType) else lambda _, *args, **kwargs: own(*args, **kwargs)


def _run_in_fp32(module: nn.Module, device_type: str, *, casts_weights: bool) -> None:
    original = own_forward(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            args, kwargs = pytree.tree_map(autocast_ops.to_fp32, (args, kwargs))
        else:  # a norm; the general case takes longer on the host than the norm itself
            args = (autocast_ops.to_fp32(args[0]),)
        with autocast_ops.disabled(device_type), _weights_in(self, torch.float32) if casts_weights else nullcontext():
            return original(self, *args, **kwargs)

    vars(forward)[_REGION] = torch.float32
    replace_forward(module, forward)


def _run_in_reduced_precision(module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    original = own_forward(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if in_full_precision_region(device_type):  # dtrain.full_precision() in code wins over a rule
            return original(self, *args, **kwargs)
        outer = autocast_dtype(device_type)
        args, kwargs = _cast_reduced_precision((args, kwargs), dtype)
        # no cache: it may hold a shared weight in the other module's format
        with torch.autocast(device_type, dtype=dtype, cache_enabled=False):
            output = original(self, *args, **kwargs)
        return _cast_reduced_precision(output, outer)

    vars(forward)[_REGION] = dtype
    replace_forward(module, forward)


def _run_fp32_class_in(module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    original = own_forward(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if in_full_precision_region(device_type):
            return original(self, *args, **kwargs)
        outer = autocast_dtype(device_type)
        args, kwargs = pytree.tree_map(partial(_cast, dtype=dtype), (args, kwargs))
        # batch norm needs FP32 weights with reduced-precision inputs, because its running statistics are FP32
        weights = torch.float32 if isinstance(self, nn.modules.batchnorm._BatchNorm) else dtype
        with torch.autocast(device_type, enabled=False), _weights_in(self, weights):
            output = original(self, *args, **kwargs)
        # a 0-dim output may be a loss, which must be FP32: here a rule with its name chose the format it is computed in
        return pytree.tree_map(lambda value: _cast(value, outer if _has_dim(value) else torch.float32), output)

    vars(forward)[_REGION] = dtype
    replace_forward(module, forward)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Makes ``forward``, which takes the module as its first argument, the forward of ``module``."""
    vars(forward)[OWN_FORWARD] = getattr(module.forward, "__func__", module.forward)
    module.forward = MethodType(forward, module)


def autocast_dtype(device_type: str) -> torch.dtype:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else torch.float32


def region_dtype(module: nn.Module) -> torch.dtype | None:
    """Returns the format that ``Autocast`` runs ``module`` in, if it differs from the modules around it."""
    return getattr(module.forward, _REGION, None)


def _cast_reduced_precision(values: Any, dtype: torch.dtype) -> Any:
    """Casts BF16 and FP16 tensors in ``values`` to ``dtype``, except 0-dim tensors, which may be losses."""

    def cast(value: Any) -> Any:
        is_reduced_precision = _has_dim(value) and value.dtype in (torch.bfloat16, torch.float16)
        return value.to(dtype) if is_reduced_precision else value

    return pytree.tree_map(cast, values)


def _has_dim(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype in TRAINABLE_DTYPES else value


@contextmanager
def _weights_in(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, ``module`` and its submodules read their weights in ``dtype``; gradients flow through the casts."""
    # a region inside a region is cast already
    replaced = [
        (child, child._parameters) for child in module.modules() if not isinstance(child._parameters, _CastView)
    ]
    # RNNs keep a list of the weights that they have read, and renew it if a parameter is another
    flat = [(child, child._flat_weights) for child, _ in replaced if isinstance(child, nn.RNNBase)]
    try:
        for child, parameters in replaced:
            child._parameters = _CastView(parameters, dtype)
        yield
    finally:
        for child, parameters in replaced:
            child._parameters = parameters
        for rnn, weights in flat:
            rnn._flat_weights = weights


class _CastView(dict[str, Any]):
    """A module's parameters, cast on each read, because a library may unshard them only then (DeepSpeed ZeRO-3)."""

    def __init__(self, parameters: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(parameters)
        self._original = parameters
        self._dtype = dtype

    def __getitem__(self, name: str) -> Any:
        return _cast(self._original[name], self._dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)  # attributes of that library's own dict class
