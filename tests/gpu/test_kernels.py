"""The Triton kernels compiled for the GPU: the tests that Triton's interpreter runs elsewhere."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.device import DEVICE, needs_gpu

pytest.importorskip("triton", reason="Triton is not installed")

from tests.unit.kernels import test_adamw, test_float8, test_proof, test_sums, test_vote
from tests.unit.kernels.test_float8 import _on_any_device, launched

__all__ = ["_on_any_device", "launched"]  # fixtures

pytestmark = needs_gpu("Triton compiles for it, and tests/unit/kernels interprets these tests on a CPU")

for module in (test_adamw, test_float8, test_proof, test_sums, test_vote):
    # test_float8 of this folder trains engines on a GPU
    tests = {name: test for name, test in vars(module).items() if name.startswith("test_") and "engine" not in name}
    globals().update(tests)


@pytest.fixture
def device() -> torch.device:
    return DEVICE
