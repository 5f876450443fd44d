"""Mapping between the tensors of Hugging Face's Llama and GPT-2 and those of dtrain's models: names, shapes, intervals.

No I/O happens here. Source of the names and layouts: the published configurations and checkpoints of
`LlamaForCausalLM` and `GPT2LMHeadModel` of `transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dtrain.config.model import DEFAULT_FACTORY, GPT2_FACTORY, ModelConfig

_BLOCK_ELEMENTS = 1 << 20  # elements converted at a time if rows are independent

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorMapping:
    """A tensor of a Hugging Face model (``name``, ``shape``), stored as an interval of a dtrain tensor.

    Attributes:
        source: name of the dtrain tensor.
        start: its first row-major element in the dtrain tensor.
        block: number of elements converted together. It divides the tensor, unless ``to_hf`` is the identity.
        to_hf: converts a flat block from dtrain's layout to Hugging Face's.
        from_hf: converts it back.
        dtype: of the tensor of Hugging Face; None: that of the export.
    """

    name: str
    shape: Shape
    source: str
    start: int
    block: int
    to_hf: Callable[[Tensor], Tensor]
    from_hf: Callable[[Tensor], Tensor]
    dtype: torch.dtype | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yields the intervals [start, stop) that are converted together, counted from the first element."""
        for start in range(0, self.numel, self.block):
            yield start, min(start + self.block, self.numel)


@dataclass(frozen=True)
class ModelMapping:
    """Maps the tensors of a model between both layouts.

    Attributes:
        tensors: dtrain's tensors, name -> shape. Vocabulary rows that no part covers are padding.
        parts: Hugging Face's tensors in its order. Tied weights appear once.
    """

    tensors: dict[str, Shape]
    parts: tuple[TensorMapping, ...]


def model_mapping(model: ModelConfig, padded_vocab_size: int) -> ModelMapping:
    """Returns the mapping of a model of dtrain's own factories, whose ``vocab_size`` and ``ffn_dim`` are set."""
    build = {DEFAULT_FACTORY: _llama, GPT2_FACTORY: _gpt2}[model.factory]
    return build(model, padded_vocab_size)


def _llama(model: ModelConfig, padded_vocab_size: int) -> ModelMapping:
    assert model.vocab_size is not None
    assert model.ffn_dim is not None
    hidden, ffn = model.hidden_dim, model.ffn_dim
    head = hidden // model.num_heads
    kv = head * (model.num_kv_heads or model.num_heads)
    tensors: dict[str, Shape] = {"embed.weight": (padded_vocab_size, hidden)}
    parts = [_plain("model.embed_tokens.weight", (model.vocab_size, hidden), "embed.weight")]
    for layer in range(model.num_layers):
        own, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        qkv, gate_up = f"{own}.attn.qkv.weight", f"{own}.ffn.gate_up.weight"
        tensors |= {
            f"{own}.attn_norm.weight": (hidden,),
            qkv: (hidden + 2 * kv, hidden),
            f"{own}.attn.out.weight": (hidden, hidden),
            f"{own}.ffn_norm.weight": (hidden,),
            gate_up: (2 * ffn, hidden),
            f"{own}.ffn.down.weight": (hidden, ffn),
        }
        parts += [
            _plain(f"{theirs}.input_layernorm.weight", (hidden,), f"{own}.attn_norm.weight"),
            _rotary(f"{theirs}.self_attn.q_proj.weight", (hidden, hidden), qkv, 0, head),
            _rotary(f"{theirs}.self_attn.k_proj.weight", (kv, hidden), qkv, hidden * hidden, head),
            _plain(f"{theirs}.self_attn.v_proj.weight", (kv, hidden), qkv, (hidden + kv) * hidden),
            _plain(f"{theirs}.self_attn.o_proj.weight", (hidden, hidden), f"{own}.attn.out.weight"),
            _plain(f"{theirs}.post_attention_layernorm.weight", (hidden,), f"{own}.ffn_norm.weight"),
            _plain(f"{theirs}.mlp.gate_proj.weight", (ffn, hidden), gate_up),
            _plain(f"{theirs}.mlp.up_proj.weight", (ffn, hidden), gate_up, ffn * hidden),
            _plain(f"{theirs}.mlp.down_proj.weight", (hidden, ffn), f"{own}.ffn.down.weight"),
        ]
    tensors["norm.weight"] = (hidden,)
    parts.append(_plain("model.norm.weight", (hidden,), "norm.weight"))
    return _with_head(model, padded_vocab_size, tensors, parts)


def _gpt2(model: ModelConfig, padded_vocab_size: int) -> ModelMapping:
    assert model.vocab_size is not None
    assert model.ffn_dim is not None
    hidden, ffn = model.hidden_dim, model.ffn_dim
    tensors: dict[str, Shape] = {
        "embed.weight": (padded_vocab_size, hidden),
        "positions.weight": (model.max_seq_len, hidden),
    }
    parts = [
        _plain("transformer.wte.weight", (model.vocab_size, hidden), "embed.weight"),
        _plain("transformer.wpe.weight", (model.max_seq_len, hidden), "positions.weight"),
    ]

    def norm(theirs: str, own: str) -> None:
        for kind in ("weight", "bias"):
            tensors[f"{own}.{kind}"] = (hidden,)
            parts.append(_plain(f"{theirs}.{kind}", (hidden,), f"{own}.{kind}"))

    def linear(theirs: str, own: str, num_in: int, num_out: int) -> None:
        tensors[f"{own}.weight"], tensors[f"{own}.bias"] = (num_out, num_in), (num_out,)
        parts.append(_transposed(f"{theirs}.weight", (num_in, num_out), f"{own}.weight"))
        parts.append(_plain(f"{theirs}.bias", (num_out,), f"{own}.bias"))

    for layer in range(model.num_layers):
        own, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        norm(f"{theirs}.ln_1", f"{own}.attn_norm")
        linear(f"{theirs}.attn.c_attn", f"{own}.attn.qkv", hidden, 3 * hidden)
        linear(f"{theirs}.attn.c_proj", f"{own}.attn.out", hidden, hidden)
        norm(f"{theirs}.ln_2", f"{own}.ffn_norm")
        linear(f"{theirs}.mlp.c_fc", f"{own}.ffn.up", hidden, ffn)
        linear(f"{theirs}.mlp.c_proj", f"{own}.ffn.down", ffn, hidden)
    norm("transformer.ln_f", "norm")
    return _with_head(model, padded_vocab_size, tensors, parts)


def _with_head(
    model: ModelConfig, padded_vocab_size: int, tensors: dict[str, Shape], parts: list[TensorMapping]
) -> ModelMapping:
    assert model.vocab_size is not None
    if not model.tie_embeddings:
        tensors["head.weight"] = (padded_vocab_size, model.hidden_dim)
        parts.append(_plain("lm_head.weight", (model.vocab_size, model.hidden_dim), "head.weight"))
    return ModelMapping(tensors, tuple(parts))


def _identity(block: Tensor) -> Tensor:
    return block


def _plain(name: str, shape: Shape, source: str, start: int = 0) -> TensorMapping:
    return TensorMapping(name, shape, source, start, _BLOCK_ELEMENTS, _identity, _identity)


def same_tensor(name: str, shape: Shape, source: str, dtype: torch.dtype | None = None) -> TensorMapping:
    """Returns the mapping of a tensor that both sides hold alike."""
    return replace(_plain(name, shape, source), dtype=dtype)


def _rotary(name: str, shape: Shape, source: str, start: int, head_dim: int) -> TensorMapping:
    """Reorders the rows of each head: dtrain rotates adjacent rows, Hugging Face's Llama the two halves."""
    half, columns = head_dim // 2, shape[1]
    return TensorMapping(
        name,
        shape,
        source,
        start,
        head_dim * columns,
        lambda block: block.view(half, 2, columns).transpose(0, 1).reshape(-1),
        lambda block: block.view(2, half, columns).transpose(0, 1).reshape(-1),
    )


def _transposed(name: str, shape: Shape, source: str) -> TensorMapping:
    """Transposes: `Conv1D` of Hugging Face's GPT-2 stores [in, out], a Linear layer [out, in]."""
    num_in, num_out = shape
    return TensorMapping(
        name,
        shape,
        source,
        0,
        num_in * num_out,
        lambda block: block.view(num_out, num_in).t().reshape(-1),
        lambda block: block.view(num_in, num_out).t().reshape(-1),
    )
