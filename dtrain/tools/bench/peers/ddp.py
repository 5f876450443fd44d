"""The same user's training on several ranks: the plain loop around DistributedDataParallel."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.tools.bench.peers import plain


def prepare(model: nn.Module, settings: plain.Settings) -> plain.Training:
    """Takes ``model`` on its device; the process group exists."""
    # gradients that lie in DDP's buckets: no second copy of them, the best that DDP offers
    replicated = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = plain.make_optimizer(model, settings)
    return plain.Training(plain.make_step(replicated, optimizer, settings), lambda: plain.states(replicated, optimizer))
