"""FSDP2 as in PyTorch's tutorial: ``fully_shard`` on each block and on the model, a mixed-precision policy."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dtrain.measure.bench.peers import plain


def prepare(model: nn.Module, settings: plain.Settings, reshard_after_forward: bool) -> plain.Training:
    """Takes ``model`` on its device, with its blocks in a ``ModuleList``; the process group exists."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if settings.bf16 else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # activations have the weights' dtype; rotary positions are FP32, as in all cases
    )
    blocks = [block for modules in model.modules() if isinstance(modules, nn.ModuleList) for block in modules]
    for module in (*blocks, model):
        fully_shard(module, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    optimizer = plain.make_optimizer(model, settings)
    step = plain.make_step(model, optimizer, replace(settings, bf16=False))  # the policy casts, not autocast

    def tensors() -> dict[str, list[Tensor]]:
        return {kind: [_local(tensor) for tensor in held] for kind, held in plain.states(model, optimizer).items()}

    return plain.Training(step, tensors)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
