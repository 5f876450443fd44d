"""Backwards that pass through a unit of ``fully_shard`` and are not its engine's, by the private state of the library.

- Another engine's ([Note: another engine's backward]) leaves no gradient.
- ``torch.autograd.grad(..., create_graph=True)``, of a gradient penalty, saves the unsharded weights in a graph of its
  own, for which ``fully_shard`` would not unshard them again. So they stay until the engine's own backward has ended.
  The new graph may also give gradients to a unit that has been reduced; these are reduced after that backward.

Between backwards of its engine a unit is set to reduce nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from dtrain.engine.adapters.fsdp2.communication import BackwardState


def guard_backward(module: FSDPModule, names: Iterable[str], state: BackwardState) -> None:
    """Lets the backward of its engine alone leave gradients in a unit.

    Args:
        module: the unit.
        names: of its parameters, in the order in which ``fully_shard`` lays them out.
        state: of the engine's backward.
    """
    group: Any = module._get_fsdp_state()._fsdp_param_group
    if group is None:  # no parameters
        return
    module.set_requires_gradient_sync(False, recurse=False)
    missing = dict(zip(names, group.fsdp_params, strict=True))  # those without a hook
    pre_backward = group.pre_backward

    def before_backward(*args: Any) -> None:
        for name, parameter in list(missing.items()):
            if parameter._unsharded_param.requires_grad:  # it exists since the first forward
                parameter._unsharded_param.register_post_accumulate_grad_hook(_refuse_others(name, state))
                del missing[name]
        if torch.is_grad_enabled():  # create_graph=True
            state.is_second_order = True
            module.set_reshard_after_forward(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
        pre_backward(*args)

    group.pre_backward = before_backward


def _refuse_others(name: str, state: BackwardState) -> Any:
    def on_gradient(parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if state.takes(name):
            parameter.grad = grad
            if grad is not None:
                state.receive(name)

    return on_gradient


def reduce_after_backward(root: FSDPModule) -> None:
    """Reduces the gradients that a backward has left in the units."""
    state: Any = root._get_fsdp_state()
    state._root_post_backward_final_callback()
