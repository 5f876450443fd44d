"""FP32 modules whose weights an engine holds in low_precision precision, as DeepSpeed does, still compute in FP32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from dtrain.precision.contract import resolve
from dtrain.precision.forward import Autocast
from dtrain.precision.policy import PrecisionPolicy

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Inside(nn.Module):
    """A plain module, attention, which reads its output layer's weight by itself, and a GRU, which keeps a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x, _ = self.attention(x, x, x, need_weights=False)
        states, _ = self.gru(x)
        return states


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = Inside()
        self.norm = nn.LayerNorm(8)
        self.outside = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states = self.inside(x)
        return states, self.outside(self.norm(states))


def test_fp32_modules_compute_in_fp32_over_low_precision_weights() -> None:
    torch.manual_seed(0)
    low_precision = Model()
    contract = resolve(PrecisionPolicy.named("bf16", rules={"inside": "fp32"}), low_precision, "compute")
    assert set(contract.replica_dtypes.values()) == {torch.bfloat16}
    low_precision.bfloat16()
    full = copy.deepcopy(low_precision).float()  # the same values
    autocast = Autocast(contract, low_precision, torch.device("cpu"))
    with autocast():
        states, output = low_precision(X)
    assert (states.dtype, output.dtype) == (torch.float32, torch.bfloat16)
    want, _ = full(X)
    torch.testing.assert_close(states, want, rtol=0, atol=0)
    states.square().sum().backward()
    want.square().sum().backward()
    for (name, parameter), reference in zip(low_precision.named_parameters(), full.parameters(), strict=True):
        if name.startswith("inside"):
            assert parameter.grad is not None
            assert reference.grad is not None
            assert parameter.grad.dtype == torch.bfloat16
            torch.testing.assert_close(parameter.grad.float(), reference.grad, rtol=1e-2, atol=1e-2)
    # the weights are as they were, also after a forward that fails
    assert all(weight.dtype == torch.bfloat16 for weight in low_precision.inside.gru._flat_weights)
    with pytest.raises(RuntimeError), autocast():
        low_precision(torch.randn(2, 5, 3))
    assert {p.dtype for p in low_precision.parameters()} == {torch.bfloat16}
    assert {type(module._parameters) for module in low_precision.modules()} == {dict}
