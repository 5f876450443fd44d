"""Runs one module of an FP32 model in another format, by the mechanism that runs ``precision.rules``.

The module receives what it would receive in a model that computes in the format as a whole, except that everything
else is FP32: its inputs, and what the modules inside it return, are rounded to the format, and the modules inside it
compute in FP32. So the loss changes by the module's own computation alone.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dtrain.config.precision import Float8
from dtrain.precision.contract import Contract, resolve
from dtrain.precision.forward import Autocast
from dtrain.precision.module_calls import ModuleCall, watch_calls
from dtrain.precision.policy import PrecisionPolicy
from dtrain.precision.rules import DTYPES

_REPLACED = ("forward", "recipe", "quantized_weight")  # attributes that a contract's forward rules set on modules


@dataclass(frozen=True)
class Handover:
    """Tensors that a module receives and returns in 16 bits if the whole model computes in a 16-bit format.

    The order is that of the flattened arguments or outputs. Rotary angles, for example, stay FP32.
    """

    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]


Handovers = Mapping[str, Handover]
"""By module name; from the first call of each module."""


def observe_handovers(model: nn.Module, forward: Callable[[], object], device: torch.device) -> Handovers:
    """Runs ``forward`` of ``model`` in BF16, as an engine would, and returns what the modules hand each other."""
    found: dict[str, Handover] = {}

    def observe(call: ModuleCall) -> None:
        found.setdefault(call.name, Handover(_reduced((call.args, call.kwargs)), _reduced(call.output)))

    with ExitStack() as stack:
        contract = resolve(PrecisionPolicy.named("bf16"), model)
        autocast = stack.enter_context(installed(model, contract, device))
        for name, parameter in model.named_parameters():
            stack.enter_context(_data_in(parameter, contract.replica_dtypes[name]))
        stack.enter_context(watch_calls(dict(model.named_modules()), end=observe))
        stack.enter_context(torch.no_grad())
        stack.enter_context(autocast())
        forward()
    return found


def _reduced(values: Any) -> tuple[bool, ...]:
    return tuple(
        isinstance(value, Tensor) and value.dtype == torch.bfloat16 and value.dim() > 0
        for value in pytree.tree_leaves(values)
    )


@contextmanager
def _data_in(parameter: nn.Parameter, dtype: torch.dtype) -> Iterator[None]:
    original = parameter.data
    parameter.data = original.to(dtype)
    try:
        yield
    finally:
        parameter.data = original


@contextmanager
def installed(model: nn.Module, contract: Contract, device: torch.device) -> Iterator[Autocast]:
    """Inside, the forward of ``model`` follows ``contract`` under the yielded ``Autocast``; then it is as before.

    Parameters keep their dtype.
    """
    modules = list(model.modules())
    before = [(type(m), {key: m.__dict__[key] for key in _REPLACED if key in m.__dict__}) for m in modules]
    try:
        yield Autocast(contract, model, device)
    finally:
        for module, (cls, attributes) in zip(modules, before, strict=True):
            if type(module) is not cls:
                module.__class__ = cls
            for key in _REPLACED:
                module.__dict__.pop(key, None)
            module.__dict__.update(attributes)


def calls_modules(module: nn.Module) -> bool:
    """Whether ``module`` has code of its own that calls modules inside it."""
    return any(_has_forward(child) for child in module.modules() if child is not module) and not is_opaque(module)


def is_opaque(module: nn.Module) -> bool:
    """Whether ``module`` reads the weights of its children and never calls them, so that they share its format."""
    return isinstance(module, nn.MultiheadAttention)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward  # a ModuleList has none


def rules_of(model: nn.Module, name: str, format_name: str) -> dict[str, str]:
    """Returns the rules that run ``name`` in a format, and in FP32 all that it calls."""
    module = model.get_submodule(name)
    rules = {glob.escape(name): format_name}
    if calls_modules(module):
        prefix = f"{name}." if name else ""
        rules |= {glob.escape(f"{prefix}{child}"): "fp32" for child, _ in module.named_children()}
    return rules


class FormatSwitch:
    """Switches one module of a model to another format, and back.

    Args:
        model: an FP32 model, whose modules do not change meanwhile.
        handovers: of the model.
        float8: options of FP8 products.
    """

    def __init__(self, model: nn.Module, handovers: Handovers, float8: Float8) -> None:
        self.model, self.handovers, self.float8 = model, handovers, float8
        self.device = device_of(model)
        self._contracts: dict[tuple[str, str], Contract] = {}  # resolving takes longer than most modules

    @contextmanager
    def in_format(self, name: str, format_name: str) -> Iterator[None]:
        """Inside, the module ``name`` computes in ``format_name`` (``bf16``, ``fp16``, ``fp8``), the rest in FP32."""
        module = self.model.get_submodule(name)
        dtype = _dtype(format_name)
        with ExitStack() as stack:
            autocast = stack.enter_context(installed(self.model, self._contract(name, format_name), self.device))
            if format_name != "fp8" and not isinstance(module, nn.RNNBase):
                stack.enter_context(_replicas(module, dtype))
            stack.enter_context(self._handing_over(name, lambda x: x.to(dtype)))
            # not the BF16 autocast of an FP8 policy: all but the module is FP32, also code outside of the model
            stack.enter_context(autocast.backward())
            yield

    @contextmanager
    def with_rounded_inputs(self, name: str, format_name: str) -> Iterator[None]:
        """Inside, the module computes in FP32 on what ``in_format`` hands it: the reference for it."""
        dtype = _dtype(format_name)
        with self._handing_over(name, lambda x: x.to(dtype).float()):
            yield

    def _contract(self, name: str, format_name: str) -> Contract:
        key = name, format_name
        if key not in self._contracts:
            rules = rules_of(self.model, name, format_name)
            if format_name == "fp8":  # its products return BF16, so the policy must be BF16
                policy = PrecisionPolicy.named("bf16", rules={"*": "fp32", **rules}, float8=self.float8)
            else:
                policy = PrecisionPolicy.named("fp32", rules=rules)
            self._contracts[key] = resolve(policy.on(self.device), self.model)
        return self._contracts[key]

    @contextmanager
    def _handing_over(self, name: str, cast: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Applies ``cast`` to the inputs of the module, and to what the outermost modules called by it return."""
        module, handovers = self.model.get_submodule(name), self.handovers
        names = {child: child_name for child_name, child in self.model.named_modules()}
        depth = 0  # of calls inside `module`, itself included

        def enter(called: nn.Module, args: Any, kwargs: Any) -> Any:
            nonlocal depth
            if called is module:
                depth = 1
                given = handovers.get(name)
                return cast_flagged((args, kwargs), given.inputs, cast) if given and name else None
            if depth:
                depth += 1
            return None

        def leave(called: nn.Module, args: Any, output: Any) -> Any:
            nonlocal depth
            if called is module:
                depth = 0
                return pytree.tree_map(_to_fp32, output)
            if not depth:
                return None
            depth -= 1
            given = handovers.get(names[called])
            return cast_flagged(output, given.outputs, cast) if depth == 1 and given else None

        with ExitStack() as stack:
            inner = [child for child in module.modules() if child is not module] if calls_modules(module) else []
            for called in (module, *inner):
                stack.callback(called.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(called.register_forward_hook(leave).remove)
            yield


def _dtype(format_name: str) -> torch.dtype:
    return torch.bfloat16 if format_name == "fp8" else DTYPES[format_name]


@contextmanager
def _replicas(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the module's own parameters are in ``dtype``, as an engine holds them."""
    own = dict(module._parameters)
    try:
        for name, p in own.items():
            if p is not None and p.is_floating_point():
                module._parameters[name] = nn.Parameter(p.detach().to(dtype), requires_grad=False)
        yield
    finally:
        module._parameters.update(own)


def cast_flagged(values: Any, flags: Sequence[bool], cast: Callable[[Tensor], Tensor]) -> Any:
    """Returns ``values`` with ``cast`` applied to the FP32 tensors whose flag is set."""
    flat, structure = pytree.tree_flatten(values)
    if len(flat) != len(flags):  # another call than the observed one
        return values
    is_fp32 = [isinstance(value, Tensor) and value.dtype == torch.float32 for value in flat]
    chosen = [cast(value) if all(both) else value for value, *both in zip(flat, flags, is_fp32, strict=True)]
    return pytree.tree_unflatten(chosen, structure)


def _to_fp32(value: Any) -> Any:
    is_reduced = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_reduced else value


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of the first parameter or buffer; the CPU without any."""
    tensors = (*model.parameters(), *model.buffers())
    return tensors[0].device if tensors else torch.device("cpu")
