"""Settings of a process whose tests share one GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# torch reads it once, in the first product on a GPU, and then refuses reproducible engines if it is not set
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    """A reproducible engine switches deterministic kernels on for the whole process; other tests have their own."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)
