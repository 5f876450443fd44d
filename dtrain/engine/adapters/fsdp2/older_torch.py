"""Adds to ``fully_shard`` of PyTorch 2.11 and 2.12, by its private state, what dtrain needs and 2.13 has."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def complete_reductions(module: FSDPModule) -> None:
    """Lets a unit reduce zeros for parameters without a gradient, so that all ranks issue the same reductions."""
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)
        return
    state: Any = module._get_fsdp_state()
    group = state._fsdp_param_group
    if group is None:  # no parameters
        return
    post_backward = group.post_backward

    def with_zeros(*_: Any) -> None:
        for parameter in group.fsdp_params if group.reduce_grads else ():
            weight = getattr(parameter, "_unsharded_param", None)  # absent before the first forward of the unit
            if weight is not None and weight.requires_grad and weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        post_backward()

    group.post_backward = with_zeros


def reset_after_error(root: FSDPModule) -> None:
    """Ends a forward that raised, else the next one would be treated as part of it."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    state: Any = root._get_fsdp_state()
    streams, shared = state._comm_ctx, state._state_ctx
    if state._device.type == "cuda":
        torch.cuda.synchronize(state._device)  # instead of a wait for each event that is forgotten below
    streams.all_gather_state = streams.reduce_scatter_state = shared.iter_forward_root = None
    streams.post_forward_order.clear()
    shared.post_backward_final_callback_queued = False
    for unit in shared.all_states:
        unit._modules_to_run_forward.clear()
        unit._training_state = idle = type(unit._training_state).IDLE
        if group := unit._fsdp_param_group:
            group.finalize_backward()
            group._training_state = idle
            group._to_sharded()
