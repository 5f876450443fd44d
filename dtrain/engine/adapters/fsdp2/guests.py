"""What reaches a unit of ``fully_shard`` from outside its engine, by the private state of the library.

A backward that is not its engine's:

- Another engine's ([Note: another engine's backward]) leaves no gradient.
- ``torch.autograd.grad(..., create_graph=True)``, of a gradient penalty, saves the unsharded weights in a graph of its
  own, for which ``fully_shard`` would not unshard them again. So they stay until the engine's own backward has ended.
  The new graph may also give gradients to a unit that has been reduced; these are reduced after that backward.

What the user does to a parameter: the model shows DTensors, or after a forward at stage 2 the unsharded parameters that
compute. ``fully_shard`` gives these no hook of a DTensor, and copies its ``requires_grad`` only when it gathers. It
calls post-accumulate hooks of DTensors while the reduction may still run.

Between backwards of its engine a unit is set to reduce nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtrain.engine.adapters.fsdp2.communication import BackwardState
from dtrain.parameters.user_hooks import AFTER_ACCUMULATION, call_after_accumulation, hook_last


class GuestParameter:
    """A parameter that the user has, and the two tensors that ``fully_shard`` has made of it.

    All have the hooks and attributes of the original, which has no values meanwhile. The engine's own hook refers to no
    tensor, which C++ would hold in a cycle.

    Args:
        original: the parameter before ``fully_shard``.
        shown: the DTensor that has replaced it.
        held: of the library; it has the unsharded parameter from the first forward on.
        state: of the engine's backward.
    """

    def __init__(self, name: str, original: nn.Parameter, shown: nn.Parameter, held: Any, state: BackwardState) -> None:
        self._original: Any = original
        self._shown: Any = shown
        self._held = held
        self._requires_grad = True  # as the user has set it last, on either tensor
        original.data = original.new_full((), torch.nan).expand_as(original)
        original._backward_hooks = original._backward_hooks or OrderedDict()
        hook_last(original, partial(_take, name, state))
        self._share(shown)

    @property
    def computing(self) -> Any:
        """The unsharded parameter; None before the first forward of the unit."""
        return getattr(self._held, "_unsharded_param", None)

    def _share(self, parameter: Any) -> None:
        # the dictionary itself, so that a hook's handle can remove it
        parameter._backward_hooks = self._original._backward_hooks
        vars(parameter).update(vars(self._original))

    def follow(self) -> None:
        """Gives both tensors what the user has set on one of them, and the hooks and attributes of the original."""
        computing, hooks = self.computing, getattr(self._original, AFTER_ACCUMULATION)
        if computing is not None and getattr(computing, AFTER_ACCUMULATION) is not hooks:
            self._share(computing)
            setattr(computing, AFTER_ACCUMULATION, hooks)
        own, both = self._requires_grad, [p for p in (self._shown, computing) if p is not None]
        if any(p.requires_grad != own for p in both):
            self._requires_grad = not own
            for parameter in both:
                parameter.requires_grad_(not own)
        if added := getattr(self._shown, AFTER_ACCUMULATION):
            setattr(self._shown, AFTER_ACCUMULATION, None)  # else fully_shard would call them
            hooks[next(iter(added))] = partial(call_after_accumulation, added)


def _take(name: str, state: BackwardState, parameter: Tensor) -> None:
    """Discards a gradient that is not of the engine's own backward."""
    grad, parameter.grad = parameter.grad, None
    if state.takes(name):
        parameter.grad = grad
        if grad is not None:
            state.receive(name)


def guard_backward(
    module: FSDPModule,
    originals: Mapping[str, nn.Parameter],
    parameters: Mapping[str, nn.Parameter],
    state: BackwardState,
) -> list[GuestParameter]:
    """Keeps gradients of its engine's own backward only in a unit; returns its parameters.

    Args:
        module: the unit.
        originals: its parameters before ``fully_shard``, in the order in which it lays them out.
        parameters: its DTensors.
        state: of the engine's backward.
    """
    group: Any = module._get_fsdp_state()._fsdp_param_group
    if group is None:  # no parameters
        return []
    module.set_requires_gradient_sync(False, recurse=False)
    guests = [
        GuestParameter(name, originals[name], parameters[name], held, state)
        for name, held in zip(parameters, group.fsdp_params, strict=True)
    ]
    pre_backward, post_backward = group.pre_backward, group.post_backward

    def before_backward(*args: Any) -> None:
        for guest in guests:
            guest.follow()
        if torch.is_grad_enabled():  # create_graph=True
            state.is_second_order = True
            module.set_reshard_after_forward(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
        pre_backward(*args)

    def after_backward(*args: Any) -> None:
        for guest in guests if group.reduce_grads else ():
            weight = guest.computing
            if weight is not None and not weight.requires_grad:  # frozen for this micro-batch: ranks reduce it as zeros
                weight.grad = torch.zeros_like(weight)
        post_backward(*args)

    group.pre_backward, group.post_backward = before_backward, after_backward
    return guests


def prepare(root: FSDPModule) -> None:
    """Lets the units choose the dtypes of their reductions while all their parameters are trained."""
    state: Any = root._get_fsdp_state()
    state._lazy_init()


def reduce_after_backward(root: FSDPModule) -> None:
    """Reduces the gradients that a backward has left in the units."""
    state: Any = root._get_fsdp_state()
    state._root_post_backward_final_callback()
