"""The default model: a decoder-only transformer.

RMSNorm before each sub-layer (Zhang and Sennrich, 2019), rotary positions (Su et al., 2021), SwiGLU (Shazeer, 2020),
grouped-query attention (Ainslie et al., 2023), no biases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.config.model import ModelConfig
from dtrain.errors import ConfigError, ModelError
from dtrain.models.attention import causal_attention, document_borders
from dtrain.models.causal_lm import (
    ModelOutput,
    SkipDraws,
    draw_init_seed,
    init_weights,
    padded_vocab_size,
)
from dtrain.models.loss_head import LossHead
from dtrain.sharding.layout import round_up

_FFN_MULTIPLE = 64


@dataclass(frozen=True)
class Dims:
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head: int
    ffn: int

    @classmethod
    def of(cls, config: ModelConfig) -> Dims:
        """Derives and checks the sizes.

        Raises:
            ConfigError: ``hidden_dim`` is not a multiple of ``num_heads``, ``num_heads`` is not a multiple of
                ``num_kv_heads``, or the head dimension is odd (rotary positions rotate pairs).
        """
        num_kv_heads = config.num_heads if config.num_kv_heads is None else config.num_kv_heads
        if config.hidden_dim % config.num_heads:
            raise ConfigError(
                f"model.hidden_dim={config.hidden_dim} is not a multiple of model.num_heads={config.num_heads}"
            )
        if config.num_heads % num_kv_heads:
            raise ConfigError(
                f"model.num_heads={config.num_heads} is not a multiple of model.num_kv_heads={num_kv_heads}"
            )
        head = config.hidden_dim // config.num_heads
        if head % 2:
            raise ConfigError(
                f"model.hidden_dim / model.num_heads = {config.hidden_dim} / {config.num_heads} = {head} is odd, but "
                "rotary positions need an even head dimension; change one of the two"
            )
        default_ffn = round_up(math.ceil(8 * config.hidden_dim / 3), _FFN_MULTIPLE)
        ffn = default_ffn if config.ffn_dim is None else config.ffn_dim
        return cls(config.hidden_dim, config.num_layers, config.num_heads, num_kv_heads, head, ffn)


def rotations(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """Returns cosine and sine of t theta^(-2j / head_dim), t in positions, pair j: FP32 [..., 1, head_dim / 2, 2]."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions.float()[..., None, None] * theta ** (-pairs / head_dim)
    return torch.view_as_real(torch.polar(torch.ones_like(angles), angles))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotates adjacent pairs of ``x`` [B, T, heads, head_dim] by ``rotation`` in FP32; keeps the dtype of ``x``."""
    if rotation.dtype != torch.float32:  # BF16 knows 256 angles of a circle, so positions would be confused
        raise ModelError(
            f"the rotary angles are {rotation.dtype}, expected float32: something casts the inputs of the blocks, such "
            f"as fully_shard with MixedPrecisionPolicy(cast_forward_inputs=True); switch that off"
        )
    pairs = x.float().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # which makes one kernel of this, and none of complex numbers
        (a, b), (cos, sin) = pairs.unbind(-1), rotation.unbind(-1)
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
    else:  # the same products and sums in one kernel
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rotation))
    return rotated.flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query self-attention with rotary positions; queries, keys and values in one matmul."""

    def __init__(self, dims: Dims, dropout: float) -> None:
        super().__init__()
        self.dims = dims
        self.dropout = dropout
        self.qkv = nn.Linear(dims.hidden, (dims.num_heads + 2 * dims.num_kv_heads) * dims.head, bias=False)
        self.out = nn.Linear(dims.num_heads * dims.head, dims.hidden, bias=False)
        kv_rows = dims.num_kv_heads * dims.head
        self.muon_splits = {"qkv.weight": (dims.num_heads * dims.head, kv_rows, kv_rows)}

    def forward(self, x: Tensor, rotation: Tensor, borders: Tensor | None = None) -> Tensor:
        """Maps ``x`` [B, T, hidden] and ``rotation`` [T, 1, head / 2, 2] or [B, T, ...] to [B, T, hidden]."""
        heads, kv_heads = self.dims.num_heads, self.dims.num_kv_heads
        qkv = self.qkv(x).unflatten(-1, (heads + 2 * kv_heads, self.dims.head))
        queries_keys, values = qkv.split((heads + kv_heads, kv_heads), dim=-2)
        queries, keys = rotate(queries_keys, rotation).split((heads, kv_heads), dim=-2)
        dropout = self.dropout if self.training else 0.0
        out: Tensor = self.out(causal_attention(queries, keys, values, dropout, borders))
        return out


class FeedForward(nn.Module):
    """Computes SwiGLU, ``down(silu(gate(x)) * up(x))``; gate and up share one matmul."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dims.hidden, 2 * dims.ffn, bias=False)
        self.down = nn.Linear(dims.ffn, dims.hidden, bias=False)
        self.muon_splits = {"gate_up.weight": (dims.ffn, dims.ffn)}

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Block(nn.Module):
    """One pre-norm layer: attention, then the feed-forward network, each added to the residual stream."""

    def __init__(self, dims: Dims, dropout: float, norm_eps: float) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(dims.hidden, eps=norm_eps)
        self.attn = Attention(dims, dropout)
        self.ffn_norm = nn.RMSNorm(dims.hidden, eps=norm_eps)
        self.ffn = FeedForward(dims)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotation: Tensor, borders: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x), rotation, borders))
        out: Tensor = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return out


class Transformer(nn.Module):
    """A causal language model over ``vocab_size`` tokens.

    Raises:
        ConfigError: the sizes in ``config`` are inconsistent (see ``Dims.of``).
    """

    uses_loss_keys = True

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        dims = Dims.of(config)
        init_seed = draw_init_seed()
        self.config = config
        self.vocab_size = vocab_size
        self.loss_head = LossHead.of(config, vocab_size)
        with SkipDraws():
            self.embed = nn.Embedding(padded_vocab_size(vocab_size), dims.hidden)
            self.dropout = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(Block(dims, config.dropout, config.norm_eps) for _ in range(dims.num_layers))
            self.norm = nn.RMSNorm(dims.hidden, eps=config.norm_eps)
            self.head = nn.Linear(dims.hidden, padded_vocab_size(vocab_size), bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        init_weights(self, init_seed, dims.num_layers, residual=("attn.out.weight", "ffn.down.weight"))

    def forward(self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> ModelOutput:
        """Predicts the next token at each position.

        Args:
            tokens: int64 [B, T].
            targets: int64 [B, T], the tokens one position ahead; ``IGNORE_INDEX`` (-100) is left out of the loss.
            positions: int64 [B, T], 0 at the first token of each document: tokens see their own document only. None:
                each row is one document.
        """
        borders = None if positions is None else document_borders(positions)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        # not a buffer, which would be broadcast and cast; computing it takes microseconds
        rotation = rotations(positions, self.config.hidden_dim // self.config.num_heads, self.config.rope_theta)
        x = self.dropout(self.embed(tokens))
        for block in self.blocks:
            x = block(x, rotation, borders)
        return self.loss_head(self.head, self.norm(x), targets, training=self.training)


def build(config: ModelConfig, vocab_size: int) -> nn.Module:
    """Builds the default model; raises ``ConfigError`` if the sizes are inconsistent or ``model.args`` has keys."""
    return Transformer(config, vocab_size)
