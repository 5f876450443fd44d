from __future__ import annotations

import math

import pytest
import torch

from dtrain.parameters.micro_batch_weight import Weight
from dtrain.sharding.accumulate import RunningSum
from dtrain.sharding.rounded_gradients import RoundedSum, StepNoise

pytest.importorskip("dtrain.kernels.rows", reason="Triton is not installed")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 5])
def test_a_matrix_is_summed_as_its_rows(ranks: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(ranks)
    numel = 2048 + 64
    weights = [Weight(torch.tensor(0.5 + rank, device=device)) for rank in range(ranks)]
    rows, whole = (torch.full((numel + 64,), math.nan, device=device) for _ in range(2))
    by_rows, at_once = RunningSum(rows[:numel]), RunningSum(whole[:numel])
    by_rows._adds_rows, at_once._adds_rows = False, True
    for _ in range(2):  # the second step overwrites the first
        for _ in range(3):
            matrix = torch.randn(ranks, numel, generator=generator).to(device, dtype)
            by_rows.push(matrix.unbind(), weights)
            at_once.push(matrix.unbind(), weights)
        by_rows.finish()
        at_once.finish()
    torch.testing.assert_close(whole[:numel], rows[:numel], rtol=1e-5, atol=1e-5)
    assert whole[numel:].isnan().all()


@pytest.mark.parametrize("ranks", [1, 3])
def test_sums_are_rounded_as_by_tensor_code(ranks: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(ranks)
    numel = 3 * 1024
    noise = StepNoise(device)
    noise.begin(3)
    weights = [Weight(torch.ones((), device=device)) for _ in range(ranks)]
    found = []
    for uses_kernel in (False, True):
        generator.manual_seed(ranks)
        main_grad = torch.full((numel + 64,), math.nan, dtype=torch.bfloat16, device=device)
        total = RoundedSum(main_grad[:numel], ("blocks", 2048), noise)
        total._memory._uses_kernel = uses_kernel
        for _ in range(3):
            total.push(torch.randn(ranks, numel, generator=generator).to(device, torch.bfloat16).unbind(), weights)
        assert main_grad[numel:].isnan().all()
        found.append(main_grad[:numel].view(torch.int16))
    assert torch.equal(*found)
