"""Operations that CUDA's autocast does not protect, and an FP32 region, with real kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtrain
from dtrain.precision import autocast_ops
from tests.gpu.device import DEVICE, needs_gpu
from tests.unit.precision.test_autocast_ops import CUDA_DIFFERS, FP32_FUNCTIONS

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("name", sorted(FP32_FUNCTIONS.keys() - CUDA_DIFFERS))
def test_reductions_linalg_norms_and_losses_are_fp32(name: str) -> None:
    torch.manual_seed(0)
    function = FP32_FUNCTIONS[name]
    root = torch.randn(4, 4, device=DEVICE)
    x = (root @ root.t() + torch.eye(4, device=DEVICE)).to(BF16)
    with torch.autocast(DEVICE.type, dtype=BF16), autocast_ops.enabled(DEVICE.type):
        output = function(x)
    assert {part.dtype for part in (output if isinstance(output, tuple) else (output,))} == {FP32}


@pytest.mark.parametrize("round_it", [False, pytest.param(True, marks=needs_gpu("the CPU forgets the region"))])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_region_is_one_again_when_a_checkpoint_runs_it_again(use_reentrant: bool, round_it: bool) -> None:
    linear = nn.Linear(16, 16).to(DEVICE, BF16)
    seen: list[torch.dtype] = []

    def forward(x: Tensor) -> Tensor:
        if round_it:
            y = linear(x)
        else:
            with dtrain.full_precision():
                y = linear(x)
        seen.append(y.dtype)
        result: Tensor = y.sin()
        return result

    x = torch.randn(4, 16, device=DEVICE, dtype=BF16, requires_grad=True)
    with torch.autocast(DEVICE.type, dtype=BF16):
        if round_it:
            with dtrain.full_precision():
                y = checkpoint(forward, x, use_reentrant=use_reentrant)
        else:
            y = checkpoint(forward, x, use_reentrant=use_reentrant)
    y.sum().backward()
    assert seen == [FP32, FP32]
