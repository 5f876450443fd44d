"""A model factory with a fault on rank 1 of a process group: ``model.factory=tests.helpers.faulty_model:build``.

The oracle of ``dtrain parity`` has no process group, so it trains the same model without the fault.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from dtrain.config.model import ModelConfig
from dtrain.models import transformer

FACTORY = "model.factory=tests.helpers.faulty_model:build"


def build(config: ModelConfig, vocab_size: int) -> nn.Module:
    """Returns the default model; ``model.args`` selects the fault of rank 1.

    ``flip=NAME``: the gradient of that parameter has the wrong sign. ``die=true``: the process is killed.
    """
    model = transformer.build(replace(config, args={}), vocab_size)
    if dist.is_initialized() and dist.get_rank() == 1:
        if "flip" in config.args:
            model.get_parameter(config.args["flip"]).register_hook(lambda grad: -grad)
        if config.args.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)
    return model
