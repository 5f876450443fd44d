"""Bytes of activations: what a forward allocates and backward still needs, as the allocator counts it.

Each storage counts once, whoever keeps it: autograd, recomputation or compiled code. Hooks on saved tensors see only
the first of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from dtrain.train.session import MicroBatch, StepWatch


class ActivationBytes(StepWatch):
    """Counts in ``nbytes`` how many bytes more are allocated on ``device`` after the forward of a step than before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.nbytes = 0

    @contextmanager
    def forward(self, micro: MicroBatch) -> Iterator[None]:
        if self._device.type == "cuda":
            before = torch.cuda.memory_allocated(self._device)
            yield
            self.nbytes = torch.cuda.memory_allocated(self._device) - before
            return
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield
        assert profiler.profiler is not None
        events = profiler.profiler.kineto_results.events()
        self.nbytes = sum(event.nbytes() for event in events if event.name() == "[memory]")
