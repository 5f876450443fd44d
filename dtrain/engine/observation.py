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
from dtrain.precision.policy import Contract, PrecisionPolicy

_HELD = (torch.float32, torch.bfloat16, torch.float16)  # what a contract decides about; all else is the model's own
_PRODUCTS = (nn.Linear, nn.modules.conv._ConvNd)


@contextmanager
def observe_forward(model: nn.Module, contract: Contract) -> Iterator[None]:
    """Asserts the contract in the forward inside, and in the backward of what it computes.

    - Each parameter has the dtype of its replica when the module that owns it is called, and its gradient has it too.
    - Products outside FP32 modules give the compute dtype.
    - PyTorch's own modules inside FP32 modules give FP32.

    Modules that run as compiled or scripted code are left alone; so are parameters that something else than the module
    which owns them reads.

    Raises:
        ContractError: naming the module, and the parameter, with the dtype expected and got.
    """
    canonical = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    inside = {id(m) for name in contract.fp32_modules for m in model.get_submodule(name).modules()}
    nodes: list[Node] = []  # the graph that forward builds holds them later
    handles: list[Any] = []
    # a hook would compile them again, or not be called
    closed = {id(part) for module in model.modules() if _is_compiled(module) for part in module.modules()}
    for name, module in model.named_modules():
        if id(module) in closed:
            continue
        names = {local: canonical[id(p)] for local, p in module.named_parameters(recurse=False)}
        if names:
            check = partial(_check_parameters, names, contract.replica_dtypes, nodes)
            handles.append(module.register_forward_pre_hook(check))
        want = torch.float32 if id(module) in inside else contract.policy.compute_dtype
        if _is_torchs_own(module) and (id(module) in inside or isinstance(module, _PRODUCTS)):
            # first of all hooks: what a user's own hook makes of the output is its business
            handles.append(module.register_forward_hook(partial(_check_output, name, want), prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_compiled(module: nn.Module) -> bool:
    is_wrapper = type(module).__module__.startswith("torch._dynamo.")  # by name: to import it takes a second
    return is_wrapper or module._compiled_call_impl is not None or isinstance(module, torch.jit.ScriptModule)


def _is_torchs_own(module: nn.Module) -> bool:
    """Whether the forward is PyTorch's, so that the dtype of what it returns follows from what it works with."""
    return type(module).forward.__module__.startswith("torch.nn.modules.")


def _check_parameters(
    names: Mapping[str, str], replica_dtypes: Mapping[str, torch.dtype], nodes: list[Node], module: nn.Module, _: Any
) -> None:
    for local, parameter in module.named_parameters(recurse=False):
        name = names[local]
        want = replica_dtypes[name]
        if parameter.dtype != want:
            raise ContractError(
                f"in the forward of {type(module).__name__}, parameter '{name}' is {parameter.dtype}; the contract "
                f"says {want}"
            )
        if parameter.requires_grad and torch.is_grad_enabled():
            node = get_gradient_edge(parameter).node
            node.register_prehook(partial(_check_gradient, name, want))
            nodes.append(node)


def _check_gradient(name: str, want: torch.dtype, grads: Sequence[Tensor | None]) -> None:
    for grad in grads:
        if grad is not None and grad.dtype != want:
            raise ContractError(f"the gradient of '{name}' leaves backward as {grad.dtype}; the contract says {want}")


def _check_output(name: str, want: torch.dtype, module: nn.Module, _: Any, output: Any) -> None:
    for value in pytree.tree_leaves(output):
        if isinstance(value, Tensor) and value.dtype in _HELD and value.dtype != want:
            raise ContractError(
                f"module '{name}' ({type(module).__name__}) computed {value.dtype}; the contract says {want}. Name it "
                f"in fp32_modules if it is to run in FP32, and leave autocast to the engine"
            )


class WireWatch:
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

    def look(self, label: str, tensor: Tensor) -> None:
        """Takes note of ``tensor``, which is about to travel.

        Raises:
            ContractError: its dtype is not the one of the contract.
        """
        replicas = self._replica_dtypes
        if replicas is not None and label not in replicas:
            return
        want = self._policy.wire_dtype(self._policy.compute_dtype if replicas is None else replicas[label])
        self.seen[label] = tensor.dtype
        if tensor.dtype != want:
            raise ContractError(f"gradients '{label}' travel as {tensor.dtype}; the contract says {want}")

    def require_seen(self) -> None:
        """At the end of a step of several ranks: what was not seen was not proven.

        Raises:
            ContractError: no gradient, or not every one, was seen on its way.
        """
        missing = [label for label in self._replica_dtypes or () if label not in self.seen]
        if missing or not self.seen:
            which = f"'{missing[0]}'" if missing else "any gradient"
            raise ContractError(f"the dtype of {which} on its way to other ranks was not seen in the first step")
