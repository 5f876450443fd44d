"""The device of these tests: a GPU, or the CPU for a dry run of what they assert before a GPU is at hand.

``DTRAIN_GPU_TESTS_ON_CPU=1 pytest tests/gpu`` replaces the device by the CPU and NCCL by gloo. Tests marked with
``needs_gpu`` are skipped then, with what they need of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

ON_CPU = os.environ.get("DTRAIN_GPU_TESTS_ON_CPU") == "1"
DEVICE = torch.device("cpu") if ON_CPU else torch.device("cuda", 0)
BACKEND = "gloo" if ON_CPU else "nccl"


def needs_gpu(reason: str) -> pytest.MarkDecorator:
    """Marks a test that cannot run with the device replaced by the CPU."""
    return pytest.mark.skipif(ON_CPU, reason=f"needs a GPU: {reason}")


def capability() -> tuple[int, int]:
    """Returns the compute capability of the GPU; (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def synchronize() -> None:
    if not ON_CPU:
        torch.cuda.synchronize()


@contextmanager
def no_waits() -> Iterator[None]:
    """Inside, an operation that makes the host wait for the GPU raises."""
    synchronize()
    if not ON_CPU:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if not ON_CPU:
            torch.cuda.set_sync_debug_mode("default")
