"""Sets up the DeepSpeed library: its accelerator, its process group, its logger."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.distributed.startup.setup import ensure_process_group
from dtrain.errors import ConfigError

_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter_tensor", "all_to_all_single")
"""The calls of DeepSpeed's backend that carry gradients."""


def load(device: torch.device) -> ModuleType:
    """Imports DeepSpeed for ``device`` and connects it to the process group; a single rank gets a group of its own.

    Raises:
        ConfigError: DeepSpeed was imported for another kind of device before.
    """
    is_chosen = "DS_ACCELERATOR" in os.environ
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # read when it is imported
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator().device_name()
    if not is_chosen:
        del os.environ["DS_ACCELERATOR"]  # child processes may choose another one
    if accelerator != device.type:
        raise ConfigError(
            f"DeepSpeed was loaded for {accelerator}, but this rank trains on {device}; set DS_ACCELERATOR="
            f"{device.type} before anything imports deepspeed"
        )
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+` is deprecated", FutureWarning)  # calls of DeepSpeed
    # DeepSpeed reads it while it runs, at stage 3 in forwards, and not every launcher sets it
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    ensure_process_group(device)
    _join(deepspeed)
    library: ModuleType = deepspeed
    return library


def _join(deepspeed: ModuleType) -> None:
    from deepspeed.utils import groups

    known = groups._WORLD_GROUP
    if known is not None and known not in dist.distributed_c10d._world.pg_map:
        # that process group was destroyed, but DeepSpeed keeps the subgroups it built from it
        groups._release_process_group_references()
    # else DeepSpeed compiles shared-memory collectives for CPU, which training does not use. Only there: the attribute
    # is filled at its first use, by a probe of all of DeepSpeed's extensions, which on a GPU runs nvcc
    if deepspeed.accelerator.get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)


def start(model: nn.Module, optimizer: torch.optim.Optimizer, config: Mapping[str, Any], device: torch.device) -> Any:
    """Returns DeepSpeed's engine for ``model``, whose values are equal on all ranks; raises as ``load``."""
    library = load(device)
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)  # DeepSpeed warns of an optimizer that it has not tested
    broadcast = library.DeepSpeedEngine._broadcast_model
    # dtrain.initialize has broadcast the model, and DeepSpeed's broadcast fails on a parameter without dimensions
    library.DeepSpeedEngine._broadcast_model = lambda engine: None
    gc.freeze()  # DeepSpeed collects garbage repeatedly, which takes a second or two for all loaded modules
    try:
        with redirect_stdout(StringIO()):  # DeepSpeed prints memory statistics
            engine, *_ = library.initialize(
                args=SimpleNamespace(device_rank=device.index or 0),
                model=model,
                optimizer=optimizer,
                config=dict(config),
            )
    finally:
        gc.unfreeze()
        library.DeepSpeedEngine._broadcast_model = broadcast
        logger.setLevel(level)
    return engine


@contextmanager
def observed_reductions(record: Callable[[Tensor], None]) -> Iterator[None]:
    """Inside, calls ``record`` with every floating-point tensor that DeepSpeed sends to reduce it."""
    from deepspeed.comm import comm

    backend = comm.cdb

    def send(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point():
                record(value)
        return real(*args, **kwargs)

    for name in _REDUCTIONS:
        setattr(backend, name, partial(send, getattr(backend, name)))
    try:
        yield
    finally:
        for name in _REDUCTIONS:
            delattr(backend, name)
