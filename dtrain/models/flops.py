"""Model FLOPs of the default transformer, the numerator of MFU."""

from __future__ import annotations

from dtrain.config.schema import DEFAULT_FACTORY, ModelConfig
from dtrain.models.transformer import Dims


def train_flops_per_token(config: ModelConfig, vocab_size: int, seq_len: int) -> int | None:
    """FLOPs of one forward and backward per trained token, or None for a factory of the user's own.

    Conventions of PaLM (Chowdhery et al., 2022, appendix B): a multiply-add is two FLOPs and the backward costs twice
    the forward, so 6 per matmul parameter; plus attention's two matmuls over the context. Unlike PaLM, attention is
    counted over the causal half only (6 rather than 12 x layers x heads x head dimension x ``seq_len``). The output
    head counts; the embedding look-up, norms, rotary positions, softmax, the padding of the vocabulary and anything
    computed twice do not.
    """
    if config.factory != DEFAULT_FACTORY:
        return None
    dims = Dims.of(config)
    attention_dim = dims.num_heads * dims.head
    qkv = dims.hidden * (attention_dim + 2 * dims.num_kv_heads * dims.head)
    layer = qkv + attention_dim * dims.hidden + 3 * dims.hidden * dims.ffn
    matmul_parameters = dims.num_layers * layer + dims.hidden * vocab_size
    return 6 * matmul_parameters + 6 * dims.num_layers * attention_dim * seq_len
