"""The loss by chunks with the products of a GPU, which give FP32 sums of 16-bit operands."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.models.causal_lm import causal_lm_output
from dtrain.models.linear_cross_entropy import linear_cross_entropy
from dtrain.tasks import IGNORE_INDEX
from tests.gpu.device import DEVICE, needs_gpu
from tests.helpers.oracle import normwise_error

TOKENS, DIM, ROWS, VOCAB = 512, 64, 1024, 1000


def head(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(TOKENS, DIM, generator=generator, device=DEVICE).to(dtype).requires_grad_()
    weight = (0.2 * torch.randn(ROWS, DIM, generator=generator, device=DEVICE)).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator, device=DEVICE)
    targets[::5] = IGNORE_INDEX
    return hidden, weight, targets


def full(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    loss = causal_lm_output(F.linear(hidden, weight)[None, :, :VOCAB], targets[None]).loss
    assert loss is not None
    return loss


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
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy(hidden, weight, targets, vocab_size=VOCAB, label_smoothing=0.1, z_loss=1e-4).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
