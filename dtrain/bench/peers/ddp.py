"""The same user's training on several ranks: the plain loop around DistributedDataParallel.

It uses nothing of dtrain but that loop; the process group exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.bench.peers import plain


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[dict[str, Tensor]],
    bf16: bool,
    max_grad_norm: float | None,
) -> Iterator[float]:
    """Trains on this rank's ``batches``, one a step, and yields this rank's loss of each step."""
    # gradients that lie in DDP's buckets: no second copy of them, the best that DDP offers
    replicated = DistributedDataParallel(model, gradient_as_bucket_view=True)
    yield from plain.train(replicated, optimizer, batches, bf16, max_grad_norm)
