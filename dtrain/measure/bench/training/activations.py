"""Bytes of activations: what a forward allocates and backward still needs, as the allocator counts it.

Each storage counts once, whoever keeps it: autograd, recomputation or compiled code. Hooks on saved tensors see only
the first of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

Output = TypeVar("Output")


def bytes_kept(forward: Callable[[], Output], device: torch.device) -> tuple[Output, int]:
    """Returns the output of ``forward``, and how many bytes more are allocated on ``device`` after it than before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        output = forward()
        return output, torch.cuda.memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output = forward()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    return output, sum(event.nbytes() for event in events if event.name() == "[memory]")
