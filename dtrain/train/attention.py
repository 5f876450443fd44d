"""Describes the attention kernel and the GPUs at a start, and compares the kernel at a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dtrain.config.model import HF_FACTORY
from dtrain.config.schema import RunConfig
from dtrain.data import Dataset
from dtrain.device import describe_cudnn
from dtrain.distributed.consensus import on_every_rank
from dtrain.distributed.logging import logger
from dtrain.engine.interface import Engine
from dtrain.errors import ConfigError
from dtrain.models import attention_shape
from dtrain.models.attention import attention_kernel, flash_attention_name, has_varlen_kernel
from dtrain.telemetry.gpu import describe_state

ATTENTION = "attention"
"""Key of the kernel's name in a checkpoint's extra and in ``environment.json``."""


def kernel_of(config: RunConfig, device: torch.device, dtype: torch.dtype, dataset: Dataset) -> str | None:
    """Returns the name of the kernel that computes attention in training; None on a CPU, or if it is not known."""
    shape = attention_shape(config.model) if device.type == "cuda" else None
    is_packed = dataset.mean_context is not None
    if shape is None or (is_packed and config.model.factory == HF_FACTORY):  # which makes a mask of the positions
        return None
    heads, kv_heads, head_dim, dropout = shape
    if is_packed:
        queries, keys = (torch.empty(1, 1, count, head_dim, device=device, dtype=dtype) for count in (heads, kv_heads))
        if has_varlen_kernel(queries, keys, dropout):
            return flash_attention_name()
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "seq_len": config.model.max_seq_len}
    return attention_kernel(device, dtype, batch=1, dropout=dropout, **sizes)


def describe_gpus(config: RunConfig, engine: Engine, dataset: Dataset) -> dict[str, Any]:
    """Says which kernels attention takes and what slows the GPUs down; returns what ``environment.json`` keeps.

    Every rank calls this. On CPUs there is nothing to say.
    """
    device = engine.device
    if device.type != "cuda":
        return {}

    def look() -> dict[str, Any]:
        cudnn, problems = describe_cudnn(torch.cuda.get_device_capability(device))
        kernel = kernel_of(config, device, engine.policy.compute_dtype, dataset)
        state = describe_state(device.index or 0)
        return {"kernel": kernel, "cudnn": cudnn, "limit": state.power_limit_w, "problems": [*problems, state.problem]}

    found = on_every_rank(engine.comm, "", look, ConfigError)
    own = found[0]
    if engine.rank == 0:
        logger.info("attention: %s; cuDNN %s", own["kernel"] or "kernel not known", own["cudnn"])
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(found):
            if config.engine.reproducible and each["kernel"] != own["kernel"]:
                each["problems"].append(f"attention by {each['kernel']}, by {own['kernel']} on rank 0: the bits differ")
            for problem in filter(None, each["problems"]):
                ranks.setdefault(problem, []).append(rank)
        for problem, where in ranks.items():
            others = f" and on {len(where) - 1} more" if len(where) > 1 else ""
            logger.warning("rank %d%s: %s", where[0], others, problem)
    return {ATTENTION: own["kernel"], "cudnn": own["cudnn"].partition(",")[0], "power_limit_w": own["limit"]}


def compare_attention(extra: Mapping[str, Any], config: RunConfig, engine: Engine, dataset: Dataset) -> None:
    """Warns if the checkpoint's steps took another kernel than this reproducible run takes."""
    if not config.engine.reproducible or ATTENTION not in extra or engine.rank != 0:
        return
    before, now = extra[ATTENTION], kernel_of(config, engine.device, engine.policy.compute_dtype, dataset)
    if before != now:
        logger.warning(
            "the checkpoint's steps took attention by %s, and this run takes %s: from here its bits are not those of a "
            "run that was never interrupted",
            *(before, now or "a kernel that is not known"),
        )
