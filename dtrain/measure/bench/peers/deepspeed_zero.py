"""DeepSpeed's ZeRO: ``deepspeed.initialize`` and a configuration of a few lines."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.measure.bench.peers import plain


def prepare(model: nn.Module, settings: plain.Settings, stage: int, fp32_sums: bool = False) -> plain.Training:
    """Takes ``model`` on its device; the process group and a launcher's environment exist.

    Args:
        model: becomes BF16 if ``settings.bf16``; DeepSpeed makes its FP32 masters from the rounded weights.
        fp32_sums: whether gradients are sent and summed in FP32; by default DeepSpeed does both in the model's dtype.
    """
    if settings.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it at its import
    import deepspeed

    sums = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}} if fp32_sums else {}
    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend())
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=plain.make_optimizer(model, settings),
        config={
            "train_micro_batch_size_per_gpu": settings.micro_batch_size,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": settings.max_grad_norm or 0.0,
            "bf16": {"enabled": settings.bf16},
            "zero_optimization": {"stage": stage},
            **sums,
        },
    )

    def step(batch: plain.Batch) -> Tensor:
        loss: Tensor = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    def tensors() -> dict[str, list[Tensor]]:
        zero = engine.optimizer
        held = plain.states(engine.module, zero.optimizer, _tensors(getattr(zero, "averaged_gradients", None)))
        # At stage 3 a parameter is empty between steps; its ds_tensor is this rank's shard.
        held["compute"] += [p.ds_tensor for p in engine.module.parameters() if hasattr(p, "ds_tensor")]
        return held

    return plain.Training(step, tensors)


def _tensors(value: Any) -> list[Tensor]:
    """Returns all tensors in nested lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]
