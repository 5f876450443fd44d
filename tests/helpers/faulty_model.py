"""A model factory with a fault on rank 1 of a process group: ``model.factory=tests.helpers.faulty_model:build``.

The oracle of ``dtrain parity`` has no process group, so it trains the same model without the fault.
"""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from torch import nn

from dtrain.config.model import ModelConfig
from dtrain.models import transformer

FACTORY = "model.factory=tests.helpers.faulty_model:build"


def build(config: ModelConfig, vocab_size: int) -> nn.Module:
    """Returns the default model; on rank 1 the gradient of the parameter ``model.args.flip`` has the wrong sign."""
    model = transformer.build(replace(config, args={}), vocab_size)
    if dist.is_initialized() and dist.get_rank() == 1:
        model.get_parameter(config.args["flip"]).register_hook(lambda grad: -grad)
    return model
