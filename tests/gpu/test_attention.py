"""The kernel that computes all documents of a batch, against a call for each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dtrain.models import attention
from dtrain.models.attention import causal_attention, document_borders, has_varlen_kernel
from tests.gpu.device import DEVICE, needs_gpu


@needs_gpu("the kernel is CUDA's")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_all_documents_at_once_equal_each_alone(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kv_heads: int
) -> None:
    lengths = [[100, 1, 155], [256], [7, 200, 40, 9]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]).to(DEVICE)
    borders = document_borders(positions)
    generator = torch.Generator(DEVICE).manual_seed(0)
    states = [
        torch.randn(3, 256, heads, 64, generator=generator, device=DEVICE, dtype=dtype).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]
    if kv_heads < 4 and not attention.varlen_groups_queries():
        pytest.skip(f"varlen_attn of torch {torch.__version__} has no enable_gqa: documents are computed one by one")
    assert has_varlen_kernel(*states[:2], dropout=0.0)

    def run() -> list[Tensor]:
        out = causal_attention(*states, 0.0, borders)  # type: ignore[misc]
        return [out, *torch.autograd.grad(out.float().square().sum(), states)]

    got = run()
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda queries, keys, dropout: False)
    for ours, expected in zip(got, run(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)
