"""Model FLOPs of the built-in models, the numerator of MFU."""

from __future__ import annotations

from dtrain.config.schema import DEFAULT_FACTORY, GPT2_FACTORY, ModelConfig
from dtrain.models.factory import vocabulary
from dtrain.models.gpt2 import ffn_dim
from dtrain.models.transformer import Dims


def train_flops_per_token(config: ModelConfig, vocab_size: int, seq_len: int) -> int | None:
    """FLOPs of one forward and backward per trained token, or None for a factory of the user's own.

    Conventions of PaLM (Chowdhery et al., 2022, appendix B): a multiply-add is two FLOPs and the backward costs twice
    the forward, so 6 per matmul parameter; plus attention's two matmuls over the context. Unlike PaLM, attention is
    counted over the causal half only (6 rather than 12 x layers x heads x head dimension x ``seq_len``). The output
    head counts; the embedding look-up, norms, biases, positions, softmax, the padding of the vocabulary and anything
    computed twice do not.
    """
    hidden = config.hidden_dim
    if config.factory == DEFAULT_FACTORY:
        dims = Dims.of(config)
        layer = hidden * (2 * hidden + 2 * dims.num_kv_heads * dims.head) + 3 * hidden * dims.ffn
    elif config.factory == GPT2_FACTORY:
        layer = 4 * hidden * hidden + 2 * hidden * ffn_dim(config)
    else:
        return None
    matmul_parameters = config.num_layers * layer + hidden * vocabulary(config, vocab_size)
    return 6 * matmul_parameters + 6 * config.num_layers * hidden * seq_len
