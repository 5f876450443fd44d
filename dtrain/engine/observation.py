"""Checks the precision contract on what really runs: the first forward, its gradients, and the first reductions.

The dtypes of stored tensors are checked elsewhere. But a library may cast weights when it unshards them, autocast may
be off, and a reduction may use another dtype than the requested one; only a running step shows that. Only dtypes are
read, once after set-up and once after each load, so later steps pay nothing and nothing waits for the device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from dtrain.engine.parts.part import StepPart
from dtrain.errors import ContractError, UsageError
from dtrain.precision.contract import Contract
from dtrain.precision.float8.linear import Float8Linear
from dtrain.precision.float8.options import Recipe
from dtrain.precision.forward import autocast_dtype, region_dtype
from dtrain.precision.policy import TRAINABLE_DTYPES, PrecisionPolicy
from dtrain.precision.regions import in_full_precision_region
from dtrain.precision.rules import has_compiled_forward, modules_without_hooks

_PRODUCTS = (nn.Linear, nn.modules.conv._ConvNd)


@contextmanager
def observe_forward(
    model: nn.Module, contract: Contract, modules: Mapping[str, nn.Module] | None = None
) -> Iterator[None]:
    """Checks the contract in the forward inside, and in its backward.

    - Each parameter has the dtype of the contract when the module that owns it is called, and so has its gradient.
    - Products return the dtype that the module computes in; FP8 products follow the contract's modules and recipe.
    - PyTorch's own modules inside FP32 modules return FP32.
    - Modules of another 16-bit format than the modules around them run in that format, and so do norms, softmax and
      losses that a rule makes low-precision.
    - No trained module runs inside a reentrant checkpoint that has no input with a gradient: it would never get one.

    Of compiled and scripted modules, only the parameters of those with a compiled forward are checked. Parameters that
    are read outside the module that owns them are not.

    Args:
        modules: by the names of the contract, which wrappers may have changed; None: as they are.

    Raises:
        ContractError: naming the module, and the parameter, with the dtype expected and got.
        UsageError: naming the module in the checkpoint.
    """
    modules = dict(model.named_modules(remove_duplicate=False)) if modules is None else modules
    places = [
        (f"{name}.{key}".lstrip("."), p) for name, module in modules.items() for key, p in module._parameters.items()
    ]
    # a tied parameter goes by its first name, as in the contract
    canonical = {id(p): name for name, p in reversed(places)}
    regions = {id(modules[name]): dtype for name, dtype in contract.regions.items()}
    float8 = {id(modules[name]): contract.recipe_of(name) for name in contract.float8_modules}
    nodes: list[Node] = []  # keeps them alive until the graph that forward builds does
    handles: list[Any] = []
    # a hook inside of a compiled module would compile it again, or not be called
    closed = modules_without_hooks(model)
    for name, module in model.named_modules():
        if id(module) in closed:
            continue
        is_compiled = has_compiled_forward(module)  # then it stands for the modules inside, too
        own = module.named_parameters(recurse=is_compiled)
        names = {local: canonical[id(p)] for local, p in own if id(p) in canonical}
        if names:
            # registered now, so it runs after the hook with which a library unshards the parameters
            check = partial(_check_parameters, names, contract, nodes)
            handles.append(module.register_forward_pre_hook(check))
        if id(module) in float8:
            handles.append(module.register_forward_pre_hook(partial(_check_float8, name, float8[id(module)])))
        region = regions.get(id(module), torch.float32)
        if region != torch.float32:
            handles.append(module.register_forward_pre_hook(partial(_check_region, name, region)))
        want = regions.get(id(module), contract.policy.compute_dtype)
        has_own_format = id(module) in regions and (want == torch.float32 or name in contract.fp32_class_overrides)
        if _is_known(module) and (has_own_format or isinstance(module, _PRODUCTS)):
            # before all other hooks, because a user's own hook may change the output
            check_output = partial(_check_output, name, want, id(module) in regions)
            handles.append(module.register_forward_hook(check_output, prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_known(module: nn.Module) -> bool:
    """Whether the forward is PyTorch's or dtrain's, so that the dtype of its output is known."""
    return type(module).forward.__module__.startswith("torch.nn.modules.") or isinstance(module, Float8Linear)


def _check_parameters(
    names: Mapping[str, str], contract: Contract, nodes: list[Node], module: nn.Module, _: Any
) -> None:
    if not torch.is_grad_enabled():
        _check_checkpoint(names.values(), module)
    for local, parameter in module.named_parameters(recurse=has_compiled_forward(module)):
        name = names.get(local, "")  # "" of one that the engine does not have
        if not name or hasattr(parameter, "to_local"):  # not gathered: the operation that reads it raises
            continue
        want = contract.parameter_dtype(name)
        if parameter.dtype != want:
            raise ContractError(
                f"in the forward of {type(module).__name__}, parameter '{name}' is {parameter.dtype}; the contract "
                f"says {want}"
            )
        # not inside torch.func's transforms, whose graph is their own
        in_transform = torch._C._are_functorch_transforms_active()
        if parameter.requires_grad and torch.is_grad_enabled() and not in_transform:
            # before accumulation, which may cast the gradient
            node = get_gradient_edge(parameter).node
            node.register_prehook(partial(_check_gradient, name, want))
            nodes.append(node)


def _check_checkpoint(names: Iterable[str], module: nn.Module) -> None:
    """Checks that ``module`` does not lose its gradients in a reentrant checkpoint, whose forward has no graph."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or not any(p.requires_grad for p in module.parameters()):
        return
    inputs = [value for value in frame.f_locals["args"] if isinstance(value, Tensor)]
    if not any(value.requires_grad for value in inputs):
        raise UsageError(
            f"'{next(iter(names))}' would never get a gradient: its {type(module).__name__} runs in a checkpoint with "
            f"use_reentrant=True, none of whose {len(inputs)} input tensors needs a gradient, so it has no backward; "
            f"pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
        )


def _check_float8(name: str, recipe: Recipe, module: nn.Module, _: Any) -> None:
    if not isinstance(module, Float8Linear):
        raise ContractError(
            f"module '{name}' is called as {type(module).__name__}; the contract says that its products are FP8"
        )
    if module.recipe != recipe:
        raise ContractError(f"module '{name}' multiplies by {module.recipe}; the contract says {recipe}")


def _check_gradient(name: str, want: torch.dtype, grads: Sequence[Tensor | None]) -> None:
    for grad in grads:
        if grad is not None and grad.dtype != want:
            raise ContractError(f"the gradient of '{name}' leaves backward as {grad.dtype}; the contract says {want}")


def _check_region(name: str, want: torch.dtype, module: nn.Module, _: Any) -> None:
    if region_dtype(module) != want:
        raise ContractError(
            f"module '{name}' ({type(module).__name__}) is called with another forward than the one that computes in "
            f"{want}, as the contract says; do not replace forward after dtrain.initialize"
        )


def _check_output(name: str, want: torch.dtype, is_region: bool, module: nn.Module, _: Any, output: Any) -> None:
    for value in pytree.tree_leaves(output):
        if not isinstance(value, Tensor) or value.dtype not in TRAINABLE_DTYPES:
            continue
        device_type = value.device.type
        # a 16-bit region casts its output to the dtype outside, where losses are FP32; an FP32 region does not
        outside = autocast_dtype(device_type) if value.dim() > 0 else torch.float32
        expected = outside if in_full_precision_region(device_type) or (is_region and want != torch.float32) else want
        if value.dtype != expected:
            raise ContractError(
                f"module '{name}' ({type(module).__name__}) computed {value.dtype}; the contract says {expected}. Give "
                f"it a rule if it is to run in another format (precision.rules), and leave autocast to the engine"
            )


class ForwardObserver(StepPart):
    """Observes the first forward with a graph since the states were loaded."""

    def __init__(self, model: nn.Module, contract: Contract) -> None:
        self._model = model
        self._contract = contract
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._is_due = False

    def loaded(self) -> None:
        self._is_due = True

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context of a forward; one without gradients would show only half of the dtypes, and is not observed."""
        if not self._is_due or not torch.is_grad_enabled():
            yield
            return
        with observe_forward(self._model, self._contract, self._modules):
            yield
        self._is_due = False


class ReduceDtypeCheck:
    """Checks the dtype of gradients as they are sent to other ranks, until the first step ends.

    Args:
        policy: defines the dtype during reduction.
        dtypes: during reduction, by the label of the gradients; other labels are no gradients. None: every recorded
            tensor is a gradient in the reduce dtype.

    Attributes:
        seen: the dtype by label in the last step that was checked.
    """

    def __init__(self, policy: PrecisionPolicy, dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        self._policy = policy
        self._dtypes = dtypes
        self.seen: dict[str, torch.dtype] = {}

    def record(self, label: str, tensor: Tensor) -> None:
        """Checks ``tensor``, which is about to be sent.

        Raises:
            ContractError: its dtype is not the one of the contract.
        """
        if self._dtypes is None:
            want = self._policy.dtype_during_reduction(self._policy.compute_dtype)
        elif label in self._dtypes:
            want = self._dtypes[label]
        else:
            return
        self.seen[label] = tensor.dtype
        if tensor.dtype != want:
            raise ContractError(f"gradients '{label}' are reduced as {tensor.dtype}; the contract says {want}")

    def require_complete(self) -> None:
        """Checks at the end of a step of several ranks that every gradient was recorded.

        Raises:
            ContractError: a gradient was not recorded, so its dtype is not proven.
        """
        missing = [label for label in self._dtypes or () if label not in self.seen]
        if missing or not self.seen:
            which = f"'{missing[0]}'" if missing else "any gradient"
            raise ContractError(f"the dtype of {which} during reduction was not seen in the first step")
