"""Bringing the DeepSpeed library up: its accelerator, its process group, its logger."""

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

from dtrain.distributed.setup import ensure_process_group
from dtrain.errors import ConfigError

_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter_tensor", "all_to_all_single")
"""The calls of its backend that carry gradients."""


def load(device: torch.device) -> ModuleType:
    """Imports DeepSpeed for ``device`` and lets it speak over the process group; one rank gets a group of its own.

    Raises:
        ConfigError: it was imported for another kind of device before.
    """
    is_chosen = "DS_ACCELERATOR" in os.environ
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # read when it is imported
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator().device_name()
    if not is_chosen:
        del os.environ["DS_ACCELERATOR"]  # children may choose another
    if accelerator != device.type:
        raise ConfigError(
            f"DeepSpeed was loaded for {accelerator}, but this rank trains on {device}; set DS_ACCELERATOR="
            f"{device.type} before anything imports deepspeed"
        )
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+` is deprecated", FutureWarning)  # its calls, not ours
    # it asks for one as it runs, at stage 3 in forwards, and not every launcher gives it
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    ensure_process_group(device)
    _join(deepspeed)
    library: ModuleType = deepspeed
    return library


def _join(deepspeed: ModuleType) -> None:
    from deepspeed.utils import groups

    known = groups._WORLD_GROUP
    if known is not None and known not in dist.distributed_c10d._world.pg_map:
        # of a process group that has ended: it keeps the groups it made over that one
        groups._release_process_group_references()
    # it would compile shared-memory collectives for a CPU, of which training uses none
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)


def start(model: nn.Module, optimizer: torch.optim.Optimizer, config: Mapping[str, Any], device: torch.device) -> Any:
    """DeepSpeed's engine for ``model``, whose values are equal on all ranks; ``optimizer`` holds what it trains.

    Raises:
        ConfigError: see :func:`load`.
    """
    library = load(device)
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of an optimizer that it has not tested
    broadcast = library.DeepSpeedEngine._broadcast_model
    # done already, and its own fails on a parameter without dimensions
    library.DeepSpeedEngine._broadcast_model = lambda engine: None
    gc.freeze()  # it collects garbage at every turn, which takes a second or two of all that is loaded
    try:
        with redirect_stdout(StringIO()):  # and prints its memory
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
def observed_reductions(look: Callable[[Tensor], None]) -> Iterator[None]:
    """Inside, shows ``look`` every floating tensor that DeepSpeed sends in order to reduce it."""
    from deepspeed.comm import comm

    backend = comm.cdb

    def send(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point():
                look(value)
        return real(*args, **kwargs)

    for name in _REDUCTIONS:
        setattr(backend, name, partial(send, getattr(backend, name)))
    try:
        yield
    finally:
        for name in _REDUCTIONS:
            delattr(backend, name)
