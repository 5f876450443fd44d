"""Generates DeepSpeed's configuration from the request, so that it cannot contradict the contract."""

from __future__ import annotations

from typing import Any

import torch

from dtrain.config.engines import DeepSpeed
from dtrain.engine.request import EngineRequest
from dtrain.precision.contract import Contract

_BUCKET = 50_000_000
"""Gradients reduced together, in elements: DeepSpeed allocates such a buffer in each backward, whatever the model."""

PERSISTENT = 100_000
"""Elements up to which a parameter stays unsharded at stage 3: DeepSpeed's own default."""


def generate(request: EngineRequest) -> dict[str, Any]:
    """Returns the configuration for ``deepspeed.initialize``: plain values, as in its JSON file.

    Whatever the engine decides itself is off: clipping, loss scale, learning rate, the number of micro-batches.
    """
    stage, device = request.step.zero_stage, request.comm.device
    config: dict[str, Any] = {
        # bookkeeping only: the engine says which micro-batch is the last of a step
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        # stage 3 supports the mean only; the state multiplies it by the world size
        "gradient_allreduce_op": "mean" if stage == 3 else "sum",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    }
    dtype = weights_dtype(request.contract, stage)
    if dtype == torch.bfloat16:
        # the vote has found every Inf and NaN before DeepSpeed would check for them
        config["bf16"] = {"enabled": True, "check_grad_overflow": False}
    elif dtype == torch.float16:
        config["fp16"] = {"enabled": True, "loss_scale": 1.0}
    if stage:
        config["zero_optimization"] |= {
            "reduce_bucket_size": min(_BUCKET, max(1, _num_trainable(request))),
            # a single rank has nothing to overlap, and the host would wait for the device after each backward
            "overlap_comm": device.type == "cuda" and stage >= 2 and request.comm.process_group is not None,
            "reduce_scatter": True,
            "contiguous_gradients": True,
        }
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = PERSISTENT
    assert isinstance(request.step.engine, DeepSpeed)
    offloads = request.step.engine.offload == "cpu"
    if offloads:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": device.type == "cuda"}
    if not offloads and (stage == 2 or (stage == 1 and dtype != torch.bfloat16)):
        # the vote carries the norm; the other optimizers of DeepSpeed cannot leave theirs out
        config["zero_optimization"]["compute_grad_norm"] = False
    return config


def weights_dtype(contract: Contract, stage: int) -> torch.dtype:
    """Returns the dtype of all trainable weights under DeepSpeed; frozen ones follow.

    At stage 0 DeepSpeed cannot sum gradients of low-precision weights in FP32, so weights are FP32 and autocast casts
    them.
    """
    return contract.policy.compute_dtype if stage else torch.float32


def _num_trainable(request: EngineRequest) -> int:
    return sum(p.numel() for p in request.model.parameters() if p.requires_grad)
