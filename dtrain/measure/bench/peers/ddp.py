"""The plain loop around DistributedDataParallel."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.measure.bench.peers import plain


def prepare(model: nn.Module, settings: plain.Settings) -> plain.Training:
    """Takes ``model`` on its device; the process group exists."""
    # Gradients as views of DDP's buckets: DDP's setting of least memory, without a second copy.
    replicated = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = plain.make_optimizer(model, settings)
    return plain.Training(plain.make_step(replicated, optimizer, settings), lambda: plain.states(replicated, optimizer))
