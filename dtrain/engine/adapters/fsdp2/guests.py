"""What reaches a unit of ``fully_shard`` from outside its engine, by the private state of the library.

A backward that is not its engine's:

- Another engine's ([Note: another engine's backward]) leaves no gradient.
- ``torch.autograd.grad(..., create_graph=True)``, of a gradient penalty, saves the unsharded weights in a graph of its
  own, for which ``fully_shard`` would not unshard them again. So they stay until the engine's own backward has ended.
  The new graph may also give gradients to a unit that has been reduced; these are reduced after that backward.

What the user does to a parameter: the model shows DTensors, or after a forward at stage 2 the unsharded parameters that
compute. ``fully_shard`` gives these no hook of a DTensor, and its ``requires_grad`` only when it gathers. It calls
post-accumulate hooks of DTensors with a reduction that may be under way.

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
from dtrain.parameters.user_hooks import AFTER_ACCUMULATION, Hooks, call_after_accumulation, call_on_gradient


class GuestParameter:
    """A parameter that the user has, and the two tensors that ``fully_shard`` has made of it.

    Args:
        original: the parameter before ``fully_shard``; hooks that are added to it later are kept too.
        shown: the DTensor that has replaced it.
        held: of the library; it has the unsharded parameter from the first forward on.
    """

    def __init__(self, name: str, original: nn.Parameter, shown: nn.Parameter, held: Any) -> None:
        self._name = name
        self._shown: Any = shown
        self._held = held
        self._requires_grad = True  # as the user has set it last, on either tensor
        self._hooks = original._backward_hooks or OrderedDict()
        # the dictionaries themselves, so that a hook's handle can remove it
        shown._backward_hooks = original._backward_hooks = self._hooks
        self._after: list[Hooks] = [getattr(original, AFTER_ACCUMULATION) or OrderedDict()]
        setattr(original, AFTER_ACCUMULATION, self._after[0])
        self._is_guarded = self._is_hooked = False

    @property
    def computing(self) -> Any:
        """The unsharded parameter; None before the first forward of the unit."""
        return getattr(self._held, "_unsharded_param", None)

    def follow(self) -> None:
        """Gives both tensors the ``requires_grad`` that the user has set on one of them."""
        own, both = self._requires_grad, [p for p in (self._shown, self.computing) if p is not None]
        if any(p.requires_grad != own for p in both):
            self._requires_grad = not own
            for parameter in both:
                parameter.requires_grad_(not own)

    def install_hooks(self, state: BackwardState) -> None:
        """Lets the hooks run in the backward that begins; they refer to no tensor, which C++ would hold in a cycle."""
        computing, after = self.computing, getattr(self._shown, AFTER_ACCUMULATION)
        if after:
            self._after.append(after)
            setattr(self._shown, AFTER_ACCUMULATION, None)  # else fully_shard would call them
        if not computing.requires_grad:
            return
        if self._hooks and not self._is_hooked:
            computing.register_hook(partial(call_on_gradient, self._hooks))
            self._is_hooked = True
        if not self._is_guarded:
            computing.register_post_accumulate_grad_hook(partial(_take, self._name, state, self._after))
            self._is_guarded = True


def _take(name: str, state: BackwardState, hooks_after: list[Hooks], parameter: Tensor) -> None:
    """Calls the user's hooks, then refuses a gradient that is not of the engine's own backward."""
    for hooks in hooks_after:
        call_after_accumulation(hooks, parameter)
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
    """Lets the backward of its engine alone leave gradients in a unit; returns its parameters.

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
        GuestParameter(name, originals[name], parameters[name], held)
        for name, held in zip(parameters, group.fsdp_params, strict=True)
    ]
    pre_backward, post_backward = group.pre_backward, group.post_backward

    def before_backward(*args: Any) -> None:
        for guest in guests:
            guest.install_hooks(state)
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
