"""Causal self-attention, also within each of the documents that share a row, and the kernel that computes it."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, current_flash_attention_impl

_KERNELS = {"CUDNN_ATTENTION": "cuDNN", "EFFICIENT_ATTENTION": "memory-efficient", "MATH": "math"}
_FLASH_HEAD_DIM = 256
"""Largest head dimension of the flash kernels; it must be a multiple of 8."""


class AttentionShape(NamedTuple):
    """Causal attention of a block, without a mask; ``dropout`` is that of its weights, or more."""

    heads: int
    kv_heads: int
    head_dim: int
    dropout: float


def document_borders(positions: Tensor) -> Tensor:
    """Returns where documents begin in the flattened tokens of a batch, and the batch's end: int32 [documents + 1].

    A document begins at each position 0 of ``positions`` [B, T], and at each row. On a GPU the host waits for the
    positions, once a forward, because their number decides the shape.
    """
    begins = positions == 0
    begins[:, 0] = True
    return F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=positions.numel()).int()


def causal_attention(
    queries: Tensor, keys: Tensor, values: Tensor, dropout: float, borders: Tensor | None = None
) -> Tensor:
    """Returns the mixed values [B, T, heads x head_dim]; a token sees itself and those before it in its document.

    Args:
        queries: [B, T, heads, head_dim]; ``keys`` and ``values`` may have fewer heads, each for as many queries.
        dropout: dropout probability of the attention weights.
        borders: of ``document_borders``; None: each row is one document.
    """
    if borders is None:
        mixed = _attend(queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), dropout)
        return mixed.transpose(1, 2).flatten(-2)
    tokens = queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1)
    if has_varlen_kernel(queries, keys, dropout):
        mixed = _varlen(*tokens, borders, longest=queries.shape[1])
    else:
        mixed = _document_by_document(*tokens, dropout, borders)
    return mixed.view(*queries.shape[:2], -1)


def has_varlen_kernel(queries: Tensor, keys: Tensor, dropout: float) -> bool:
    """Whether one kernel computes all documents: flash attention, on GPUs, in BF16 or FP16, without dropout."""
    head_dim = queries.shape[-1]
    return (
        queries.is_cuda
        and queries.dtype in (torch.bfloat16, torch.float16)
        and not dropout
        and head_dim % 8 == 0
        and head_dim <= _FLASH_HEAD_DIM
        and (queries.shape[-2] == keys.shape[-2] or varlen_groups_queries())
        and _gpu_has_varlen(queries.device.index)
    )


@cache
def _gpu_has_varlen(index: int) -> bool:
    return "window_size" in _varlen_options() and torch.cuda.get_device_capability(index) >= (8, 0)


def varlen_groups_queries() -> bool:
    """Whether ``varlen_attn`` takes fewer key heads than query heads, which torch 2.11 does not."""
    return "enable_gqa" in _varlen_options()


@cache
def _varlen_options() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def _varlen(queries: Tensor, keys: Tensor, values: Tensor, borders: Tensor, longest: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: Any = {"window_size": (-1, 0)}  # causal
    if queries.shape[1] != keys.shape[1]:
        options["enable_gqa"] = True
    mixed = varlen_attn(queries, keys, values, borders, borders, longest, longest, **options)
    assert isinstance(mixed, Tensor)
    return mixed


def _document_by_document(queries: Tensor, keys: Tensor, values: Tensor, dropout: float, borders: Tensor) -> Tensor:
    """Returns [tokens, heads, head_dim].

    A call for each document computes none of the scores that a block mask would discard: at T = 1024 and documents of
    200 tokens, a third of the mask's time on a CPU.
    """
    lengths = borders.diff().tolist()
    q, k, v = (x.transpose(0, 1)[None].split(lengths, dim=2) for x in (queries, keys, values))
    return torch.cat([_attend(*one, dropout)[0].transpose(0, 1) for one in zip(q, k, v, strict=True)])


# what torch.compiler.disable sets, without its import of dynamo, which takes a second: compiled, each batch would have
# a graph of its own
vars(_document_by_document)["_torchdynamo_disable"] = True


def _attend(queries: Tensor, keys: Tensor, values: Tensor, dropout: float) -> Tensor:
    """Computes causal attention, all [B, heads, T, head_dim]."""
    return F.scaled_dot_product_attention(
        queries, keys, values, dropout_p=dropout, is_causal=True, enable_gqa=queries.shape[1] != keys.shape[1]
    )


def attention_kernel(
    device: torch.device,
    dtype: torch.dtype,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    seq_len: int,
    head_dim: int,
    dropout: float = 0.0,
) -> str:
    """Returns the kernel that causal ``scaled_dot_product_attention`` takes in training, without running it.

    PyTorch decides by device, dtype, shapes, strides and whether gradients are needed, so the operands have those of
    the built-in models.

    Returns:
        ``cuDNN``, ``FlashAttention 2`` (or 3, if it is active), ``memory-efficient`` or ``math``; or ``unknown: `` and
        the reason.
    """
    try:
        with torch.enable_grad():
            shapes = ((batch, seq_len, count, head_dim) for count in (heads, kv_heads, kv_heads))
            operands = (torch.empty(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
            q, k, v = (operand.transpose(1, 2) for operand in operands)
            is_grouped = kv_heads != heads
            choice = torch._fused_sdp_choice(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=is_grouped)
        names = {kind.value: name for name, kind in SDPBackend.__members__.items()}
    except (RuntimeError, AssertionError, AttributeError, ImportError, TypeError) as error:
        return f"unknown: {(str(error).splitlines() or [type(error).__name__])[0]}"
    if choice not in names or choice < 0:
        return f"unknown: PyTorch chose {choice}, which names no kernel"
    kernel = names[choice]
    return flash_attention_name() if kernel == "FLASH_ATTENTION" else _KERNELS.get(kernel, kernel)


def flash_attention_name() -> str:
    """Returns ``FlashAttention 2``, PyTorch's own, or the one that is active in its place."""
    return f"FlashAttention {(current_flash_attention_impl() or 'FA2').removeprefix('FA')}"
