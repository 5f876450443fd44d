"""DDP with torch's ZeroRedundancyOptimizer: each rank keeps the moments of some of the parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from dtrain.measure.bench.peers import plain


def prepare(model: nn.Module, settings: plain.Settings) -> plain.Training:
    """Takes ``model`` on its device; the process group exists."""
    replicated = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        plain.decay_groups(model, settings.weight_decay),
        optimizer_class=torch.optim.AdamW,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )
    # optim is the inner optimizer, which holds this rank's moments.
    return plain.Training(
        plain.make_step(replicated, optimizer, settings), lambda: plain.states(replicated, optimizer.optim)
    )
