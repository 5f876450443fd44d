"""The loss by chunks on a fake CUDA device: its products give FP32 sums, and the host waits for nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.models.linear_cross_entropy import linear_cross_entropy
from tests.fake.device import DEVICE, fake_cuda


class Products(TorchDispatchMode):
    """Counts the products that add to FP32 sums of 16-bit operands."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "addmm" and args[1].dtype != torch.float32:
            assert result.dtype == torch.float32
            assert result is kwargs["out"] is args[0], "in place"
            self.count += 1
        return result


def test_sums_over_chunks_are_fp32() -> None:
    dtype = torch.float16
    with fake_cuda() as device:
        out, operand = torch.empty(16, 16, device=DEVICE), torch.empty(16, 16, device=DEVICE, dtype=dtype)
        try:
            torch.addmm(out, operand, operand, out_dtype=torch.float32, out=out)
        except TypeError:
            pytest.skip(f"torch {torch.__version__} takes out_dtype for beta in addmm of fake tensors, not on a GPU")
        hidden = torch.empty(256, 64, device=DEVICE, dtype=dtype, requires_grad=True)
        weight = torch.empty(512, 64, device=DEVICE, dtype=dtype, requires_grad=True)
        targets = torch.zeros(256, dtype=torch.int64, device=DEVICE)
        with device.no_waits(), Products() as products:
            loss = linear_cross_entropy(hidden, weight, targets, vocab_size=500, chunk_rows=64, z_loss=0.1)
            loss.backward()
        assert loss.dtype == torch.float32
        assert weight.grad is not None
        assert weight.grad.dtype == dtype
        assert products.count == 8, "FP16 hidden states have FP32 gradients until the loss scale comes"
