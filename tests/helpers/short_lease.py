"""A model factory of runs whose lease another host may take over after a second."""

from __future__ import annotations

from torch import nn

from dtrain.checkpoint.lease import lease
from dtrain.checkpoint.lease.lease import LeaseTiming
from dtrain.config.model import ModelConfig
from dtrain.models import transformer

FACTORY = "model.factory=tests.helpers.short_lease:build"


def build(config: ModelConfig, vocab_size: int) -> nn.Module:
    """The default model; a run takes its lease only after it has built the model."""
    lease.TIMING = LeaseTiming(heartbeat_s=0.2, limit_s=1.5, poll_s=0.1)
    return transformer.build(config, vocab_size)
