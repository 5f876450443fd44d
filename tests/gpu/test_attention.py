"""Attention on one GPU: the named kernel runs, and FlashAttention 3 is taken only after a proof."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel

from dtrain.cli.resolve import compose
from dtrain.device import describe_cudnn
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.engine.deterministic import deterministic_kernels
from dtrain.models import flash_attention
from dtrain.models.attention import AttentionShape, attention_kernel
from dtrain.models.flash_attention import choose_attention, flash_attention_3_problem
from dtrain.telemetry.gpu import describe_state
from dtrain.train.setup import torch_settings_restored
from tests.gpu.device import DEVICE, ON_CPU, capability, needs_gpu

SIZES: dict[str, Any] = {"batch": 2, "heads": 8, "kv_heads": 8, "seq_len": 256, "head_dim": 64}
BACKENDS = {"FlashAttention 2": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
BACKENDS |= {"cuDNN": SDPBackend.CUDNN_ATTENTION, "memory-efficient": SDPBackend.EFFICIENT_ATTENTION}


def test_the_named_kernel_computes_the_attention_of_a_default_call() -> None:
    name = attention_kernel(DEVICE, torch.bfloat16, **SIZES)
    q, k, v = (torch.randn(2, 8, 256, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    own = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_kernel(BACKENDS[name]):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), own)


@needs_gpu("a CPU has no cuDNN")
def test_the_cudnn_in_use_is_named_with_its_file() -> None:
    version, _, file = describe_cudnn(capability())[0].partition(", ")
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert Path(file).is_file()


@needs_gpu("a CPU has no power limit")
def test_the_limits_are_those_of_a_card() -> None:
    state = describe_state(0)
    if state.power_limit_w is None:
        pytest.skip("nvidia-smi does not tell")
    assert 0 < state.power_limit_w <= (state.max_power_limit_w or state.power_limit_w)
    assert 0 < (state.sm_clock_mhz or 1) <= (state.max_sm_clock_mhz or 1e9)


def test_deterministic_gradients_of_attention_are_equal() -> None:
    shape = AttentionShape(8, 2, 64, 0.0)
    with deterministic_kernels():
        first, second = (flash_attention._gradients(shape, DEVICE, torch.bfloat16, 512) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.skipif(ON_CPU or bool(flash_attention_3_problem(capability())), reason="FlashAttention 3 is not installed")
def test_a_reproducible_training_takes_flash_attention_3() -> None:
    config = compose(["experiment=smoke", "engine.reproducible=true", "model.hidden_dim=256", "model.max_seq_len=512"])
    with torch_settings_restored():
        choose_attention(config, SingleRank(DEVICE), torch.bfloat16)
        assert current_flash_attention_impl() == "FA3"
        with deterministic_kernels():
            assert attention_kernel(DEVICE, torch.bfloat16, **SIZES) == "FlashAttention 3"
    assert current_flash_attention_impl() is None
