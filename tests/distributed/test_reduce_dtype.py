"""The dtype of gradients during reduction: addends are rounded to it, sums over ranks are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dtrain
from dtrain.engine.native import NativeEngine
from dtrain.errors import ConfigError
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

GRADIENTS = [256.0, *[1.0] * 7]  # BF16 holds 256 and 1, but 256 + 1 is 256 there


class Sum(nn.Module):
    """The gradient of its weight is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x.to(self.weight.dtype)).float().sum()


def summed(rank: int, world: int, stage: int, precision: str, reduce_dtype: str) -> tuple[str, float]:
    """The contract's dtype, and the sum of `GRADIENTS`, which are dealt to the ranks round-robin."""
    engine = dtrain.initialize(
        Sum(), zero_stage=stage, precision=precision, loss_scale=1.0, reduce_dtype=reduce_dtype, seed=0
    )
    assert isinstance(engine, NativeEngine)
    for value in engine.accumulate(GRADIENTS[rank::world]):
        engine.backward(engine(torch.full((8,), value)))
    engine.finish_gradients()
    ((_, gradient),) = engine.full_state("main_grad")
    assert torch.equal(gradient, gradient[0].expand(8))
    return engine.contract.to_dict()["reduce"], float(gradient[0])


@pytest.mark.parametrize(
    ("stage", "precision", "reduce_dtype", "said", "got"),
    [
        (2, "bf16", "auto", "bf16", 263.0),
        (3, "bf16", "auto", "bf16", 263.0),
        (0, "bf16", "auto", "fp32", 263.0),
        (2, "bf16", "fp32", "fp32", 263.0),
        # rank 0's 256 + 1 + 1 + 1 is rounded once, to 260; with every sum in BF16 it would be 256, and 260 in all
        (0, "bf16", "bf16", "bf16", 264.0),
        (1, "bf16", "bf16", "bf16", 264.0),
        (2, "fp32", "bf16", "bf16", 263.0),
        (1, "fp16", "fp16", "fp16", 263.0),
    ],
)
def test_partial_sums_are_fp32(stage: int, precision: str, reduce_dtype: str, said: str, got: float) -> None:
    assert run_ranks(2, summed, stage, precision, reduce_dtype) == [(said, got)] * 2


def test_small_leaves_of_many_ranks_are_not_lost() -> None:
    """In a sum in BF16 every 1 added to 256 would vanish."""
    total = torch.tensor(256.0).bfloat16()
    for _ in range(7):
        total = total + torch.tensor(1.0).bfloat16()
    assert float(total) == 256.0
    for result in run_ranks(4, summed, 2, "bf16", "bf16"):
        assert result == ("bf16", 263.0)


def refused(rank: int, world: int, precision: str, reduce_dtype: str) -> str:
    with pytest.raises(ConfigError) as caught:
        dtrain.initialize(Sum(), precision=precision, reduce_dtype=reduce_dtype, seed=0)
    return str(caught.value)


def test_a_senseless_one_is_refused() -> None:
    assert "no loss scale" in refused(0, 1, "bf16", "fp16")
    assert "loses three bits of each" in refused(0, 1, "fp16", "bf16")
