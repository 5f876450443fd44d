"""The precision contract, asserted on what really runs: the first forward, its gradients, and the first reductions.

Dtypes at rest are asserted elsewhere. But a library may cast weights when it gathers them, autocast may not be on, and
a reduction may travel in another dtype than the one that was asked for; this is where it would be seen. Only dtypes
are looked at, once after set-up and once after each load: it costs nothing later, and no device is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils import _pytree as pytree

from dtrain.errors import ContractError
from dtrain.precision.contract import Contract
from dtrain.precision.float8.linear import Float8Linear
from dtrain.precision.float8.options import Recipe
from dtrain.precision.forward import autocast_dtype, reduced_precision_region
from dtrain.precision.policy import HELD, PrecisionPolicy
from dtrain.precision.regions import is_exempt
from dtrain.precision.rules import is_compiled

_PRODUCTS = (nn.Linear, nn.modules.conv._ConvNd)


@contextmanager
def observe_forward(model: nn.Module, contract: Contract) -> Iterator[None]:
    """Asserts the contract in the forward inside, and in the backward of what it computes.

    - Each parameter has the dtype of the contract when the module that owns it is called, and its gradient has it too.
    - Products give the dtype that the module computes in; FP8 products are those of the contract's modules and recipe.
    - PyTorch's own modules inside FP32 modules give FP32.
    - Modules of another 16-bit format than what is round them, and norms, softmax and losses that a rule makes low, run
      as such.

    Modules that run as compiled or scripted code are left alone; so are parameters that something else than the module
    which owns them reads.

    Raises:
        ContractError: naming the module, and the parameter, with the dtype expected and got.
    """
    canonical = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    regions = {id(model.get_submodule(name)): dtype for name, dtype in contract.regions.items()}
    float8 = {id(model.get_submodule(name)) for name in contract.float8_modules}
    nodes: list[Node] = []  # the graph that forward builds holds them later
    handles: list[Any] = []
    # a hook would compile them again, or not be called
    closed = {id(part) for module in model.modules() if is_compiled(module) for part in module.modules()}
    for name, module in model.named_modules():
        if id(module) in closed:
            continue
        names = {local: canonical[id(p)] for local, p in module.named_parameters(recurse=False)}
        if names:
            check = partial(_check_parameters, names, contract, nodes)
            handles.append(module.register_forward_pre_hook(check))
        if id(module) in float8:
            handles.append(module.register_forward_pre_hook(partial(_check_float8, name, contract.recipe)))
        region = regions.get(id(module), torch.float32)
        if region != torch.float32:
            handles.append(module.register_forward_pre_hook(partial(_check_region, name, region)))
        want = regions.get(id(module), contract.policy.compute_dtype)
        has_own_format = id(module) in regions and (want == torch.float32 or name in contract.forced)
        if _is_known(module) and (has_own_format or isinstance(module, _PRODUCTS)):
            # first of all hooks: what a user's own hook makes of the output is its business
            check_output = partial(_check_output, name, want, id(module) in regions)
            handles.append(module.register_forward_hook(check_output, prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_known(module: nn.Module) -> bool:
    """Whether the forward is PyTorch's or our own, so that the dtype of what it returns follows from what it is."""
    return type(module).forward.__module__.startswith("torch.nn.modules.") or isinstance(module, Float8Linear)


def _check_parameters(
    names: Mapping[str, str], contract: Contract, nodes: list[Node], module: nn.Module, _: Any
) -> None:
    for local, parameter in module.named_parameters(recurse=False):
        name = names[local]
        want = contract.parameter_dtype(name)
        if parameter.dtype != want:
            raise ContractError(
                f"in the forward of {type(module).__name__}, parameter '{name}' is {parameter.dtype}; the contract "
                f"says {want}"
            )
        if parameter.requires_grad and torch.is_grad_enabled():
            node = get_gradient_edge(parameter).node
            node.register_prehook(partial(_check_gradient, name, want))
            nodes.append(node)


def _check_float8(name: str, recipe: Recipe | None, module: nn.Module, _: Any) -> None:
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
    if reduced_precision_region(module) != want:
        raise ContractError(
            f"module '{name}' ({type(module).__name__}) is called with another forward than the one that computes in "
            f"{want}, as the contract says; do not replace forward after dtrain.initialize"
        )


def _check_output(name: str, want: torch.dtype, is_region: bool, module: nn.Module, _: Any, output: Any) -> None:
    for value in pytree.tree_leaves(output):
        if not isinstance(value, Tensor) or value.dtype not in HELD:
            continue
        device_type = value.device.type
        # a region of 16 bits casts what it returns to the dtype outside, where losses are FP32; one of FP32 does not
        outside = autocast_dtype(device_type) if value.dim() > 0 else torch.float32
        expected = outside if is_exempt(device_type) or (is_region and want != torch.float32) else want
        if value.dtype != expected:
            raise ContractError(
                f"module '{name}' ({type(module).__name__}) computed {value.dtype}; the contract says {expected}. Give "
                f"it a rule if it is to run in another format (precision.rules), and leave autocast to the engine"
            )


class ReduceDtypeCheck:
    """Sees gradients where they are sent to other ranks, and asserts their dtype until the first step is done.

    Args:
        policy: says in which dtype they travel.
        replica_dtypes: the dtype of the replicas whose gradients travel under a label; other labels are no gradients.
            None: all that is shown travels in the reduce dtype.

    Attributes:
        seen: the dtype by label, of the step that was watched last.
    """

    def __init__(self, policy: PrecisionPolicy, replica_dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        self._policy = policy
        self._replica_dtypes = replica_dtypes
        self.seen: dict[str, torch.dtype] = {}

    def record(self, label: str, tensor: Tensor) -> None:
        """Takes note of ``tensor``, which is about to travel.

        Raises:
            ContractError: its dtype is not the one of the contract.
        """
        replicas = self._replica_dtypes
        if replicas is not None and label not in replicas:
            return
        want = self._policy.dtype_during_reduction(self._policy.compute_dtype if replicas is None else replicas[label])
        self.seen[label] = tensor.dtype
        if tensor.dtype != want:
            raise ContractError(f"gradients '{label}' travel as {tensor.dtype}; the contract says {want}")

    def require_complete(self) -> None:
        """At the end of a step of several ranks: what was not seen was not proven.

        Raises:
            ContractError: no gradient, or not every one, was seen on its way.
        """
        missing = [label for label in self._replica_dtypes or () if label not in self.seen]
        if missing or not self.seen:
            which = f"'{missing[0]}'" if missing else "any gradient"
            raise ContractError(f"the dtype of {which} on its way to other ranks was not seen in the first step")
