"""Operations with real kernels: attention over documents, the loss by chunks, autocast and FP32 regions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtrain
from dtrain.models import attention
from dtrain.models.attention import causal_attention, document_borders, has_varlen_kernel
from dtrain.models.causal_lm import causal_lm_output
from dtrain.models.linear_cross_entropy import linear_cross_entropy
from dtrain.precision import autocast_ops
from dtrain.tasks import IGNORE_INDEX
from tests.gpu.device import DEVICE, needs_gpu, no_waits
from tests.helpers.oracle import normwise_error
from tests.unit.precision.test_autocast_ops import CUDA_DIFFERS, FP32_FUNCTIONS


@needs_gpu("the kernel is CUDA's")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_documents_at_once_equal_each_alone(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kv_heads: int) -> None:
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


TOKENS, DIM, ROWS, VOCAB = 512, 64, 1024, 1000


def head(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(TOKENS, DIM, generator=generator, device=DEVICE).to(dtype).requires_grad_()
    weight = (0.2 * torch.randn(ROWS, DIM, generator=generator, device=DEVICE)).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator, device=DEVICE)
    targets[::5] = IGNORE_INDEX
    return hidden, weight, targets


def full(hidden: Tensor, weight: Tensor, targets: Tensor) -> Any:
    return causal_lm_output(F.linear(hidden, weight)[None, :, :VOCAB], targets[None]).loss


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float16, 2.0**16)], ids=str
)
def test_chunks_follow_full_logits(dtype: torch.dtype, scale: float) -> None:
    hidden, weight, targets = head(dtype)
    exact = [value.detach().double().requires_grad_() for value in (hidden, weight)]
    true = torch.autograd.grad(F.cross_entropy((exact[0] @ exact[1].t())[:, :VOCAB], targets) * scale, exact)
    want = full(hidden, weight, targets)
    got = linear_cross_entropy(hidden, weight, targets, vocab_size=VOCAB, chunk_rows=100)
    assert got.item() == pytest.approx(want.item(), rel=1e-6)
    theirs = torch.autograd.grad(want * scale, (hidden, weight))
    ours = torch.autograd.grad(got * scale, (hidden, weight))
    for own, other, exactly in zip(ours, theirs, true, strict=True):
        assert own.dtype == dtype
        reference = exactly.float()
        assert normwise_error(own, reference) <= 1.5 * normwise_error(other, reference) + 1e-6
    assert not ours[1][VOCAB:].any()


@needs_gpu("the allocator counts what kernels take")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_beside_the_gradients_is_a_twentieth_of_full_logits(dtype: torch.dtype) -> None:
    hidden = torch.randn(8192, 256, device=DEVICE, dtype=dtype, requires_grad=True)
    weight = torch.randn(32768, 256, device=DEVICE, dtype=dtype, requires_grad=True)
    targets = torch.randint(32768, (8192,), device=DEVICE)
    linear_cross_entropy(hidden[:128], weight, targets[:128]).backward()  # cuBLAS takes its workspace
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    linear_cross_entropy(hidden, weight, targets).backward()
    peak = torch.cuda.max_memory_allocated(DEVICE) - before
    assert peak - hidden.nbytes - 4 * weight.numel() <= 0.05 * 4 * 8192 * 32768


@needs_gpu("a synchronization raises")
def test_the_host_waits_for_nothing() -> None:
    hidden, weight, targets = head(torch.bfloat16)
    with no_waits():
        linear_cross_entropy(hidden, weight, targets, vocab_size=VOCAB, label_smoothing=0.1, z_loss=1e-4).backward()


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
        return y.sin()

    x = torch.randn(4, 16, device=DEVICE, dtype=BF16, requires_grad=True)
    with torch.autocast(DEVICE.type, dtype=BF16):
        if round_it:
            with dtrain.full_precision():
                y = checkpoint(forward, x, use_reentrant=use_reentrant)
        else:
            y = checkpoint(forward, x, use_reentrant=use_reentrant)
    y.sum().backward()
    assert seen == [FP32, FP32]
