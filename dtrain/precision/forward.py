"""How a forward runs under a contract: autocast outside, islands of FP32 inside, and outputs that are never low."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dtrain.precision import cpu_autocast
from dtrain.precision.policy import Contract, PrecisionPolicy


class Autocast:
    """Installs a contract's forward rules on a model.

    Autocast alone would run an FP32 Linear in BF16, so the forward of every FP32 module runs with autocast off and its
    floating inputs cast; and on CPU it leaves softmax and norms low, which :mod:`dtrain.precision.cpu_autocast` mends.
    Where an engine holds their weights low, they compute on FP32 copies.
    """

    def __init__(self, contract: Contract, model: nn.Module, device: torch.device) -> None:
        self._policy = contract.policy
        self._device_type = device.type
        if self._policy.is_low:
            # the modules inside too: a ModuleList has no forward of its own, and a caller may reach past a parent's
            inside = {id(m): m for name in contract.fp32_modules for m in model.get_submodule(name).modules()}
            for module in inside.values():
                _run_in_fp32(module, device.type, casts_weights=contract.weights == "compute")

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The context that a forward runs in."""
        if not self._policy.is_low:
            yield
            return
        with torch.autocast(self._device_type, dtype=self._policy.compute_dtype), self.backward():
            yield

    def backward(self) -> AbstractContextManager[None]:
        """The context that a backward runs in."""
        on_cpu = self._policy.is_low and self._device_type == "cpu"
        return cpu_autocast.enabled() if on_cpu else nullcontext()

    def cast_output(self, output: Any) -> Any:
        """``output`` with its floating tensors in the output dtype, unless it carries a loss already.

        0-dim tensors stay as they are: a loss that was computed low must be refused, not dressed up.
        """
        if not self._policy.is_low or find_loss(output) is not None:
            return output
        dtype = self._policy.output_dtype

        def cast(value: Any) -> Any:
            low = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
            return value.to(dtype) if low else value

        return pytree.tree_map(cast, output)


def find_loss(output: Any) -> Tensor | None:
    """The loss inside a model's output: the 0-dim tensor itself, ``output["loss"]`` or ``output.loss``, else None."""
    if isinstance(output, Tensor):
        return output if output.dim() == 0 else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 else None


def set_matmul_precision(policy: PrecisionPolicy) -> None:
    """Sets the process-wide mode of FP32 products (matrices, convolutions, RNNs): TF32 only where the policy is."""
    torch.set_float32_matmul_precision("high" if policy.tf32 else "highest")
    cudnn: Any = torch.backends.cudnn
    cudnn.allow_tf32 = policy.tf32
    # without an answer of their own the two would follow torch.backends.fp32_precision, whatever that was set to
    for operator in (cudnn.conv, cudnn.rnn):
        operator.fp32_precision = "tf32" if policy.tf32 else "ieee"


def _run_in_fp32(module: nn.Module, device_type: str, *, casts_weights: bool) -> None:
    own = module.forward
    # a bound method again, so that a deep copy of the module (an average of the weights, say) runs its own weights
    original = own.__func__ if isinstance(own, MethodType) else lambda _, *args, **kwargs: own(*args, **kwargs)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(cpu_autocast.to_fp32, (args, kwargs))
        weights = _fp32_weights(self) if casts_weights else nullcontext()
        with torch.autocast(device_type, enabled=False), weights:
            return original(self, *args, **kwargs)

    module.forward = MethodType(forward, module)


@contextmanager
def _fp32_weights(module: nn.Module) -> Iterator[None]:
    """Inside, ``module`` and all in it read FP32 copies of their low weights, through which gradients flow back."""
    replaced = [(part, part._parameters) for part in module.modules() if not isinstance(part._parameters, _FP32View)]
    flat = [(part, part._flat_weights) for part, _ in replaced if isinstance(part, nn.RNNBase)]
    try:
        for part, parameters in replaced:
            part._parameters = _FP32View(parameters)
        for rnn, weights in flat:
            rnn._flat_weights = [cpu_autocast.to_fp32(weight) for weight in weights]
        yield
    finally:
        for part, parameters in replaced:
            part._parameters = parameters
        for rnn, weights in flat:
            rnn._flat_weights = weights


class _FP32View(dict[str, Any]):
    """A module's parameters, cast when they are read: not before, for a library may gather them then."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self._original = parameters

    def __getitem__(self, name: str) -> Any:
        return cpu_autocast.to_fp32(self._original[name])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)  # that library's own, on its kind of dict
