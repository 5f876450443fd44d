"""The models that the parts train, and their FLOPs. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dtrain.config.model import ModelConfig

_LLAMA = ModelConfig(max_seq_len=4096, vocab_size=128_256, rope_theta=500_000.0, tie_embeddings=True)

MODELS: dict[str, ModelConfig] = {
    # Llama 3.2 1B with 16 heads of 128 instead of 32 of 64, which has as many parameters and is what larger models have
    "1.2B": replace(
        _LLAMA, name="llama-1b", num_layers=16, hidden_dim=2048, num_heads=16, num_kv_heads=4, ffn_dim=8192
    ),
    "3B": replace(_LLAMA, name="llama-3b", num_layers=28, hidden_dim=3072, num_heads=24, num_kv_heads=8, ffn_dim=8192),
    "400M": replace(
        _LLAMA, name="llama-400m", num_layers=16, hidden_dim=1024, num_heads=8, num_kv_heads=4, ffn_dim=4352
    ),
    "50M": replace(
        _LLAMA,
        name="llama-50m",
        num_layers=8,
        hidden_dim=512,
        num_heads=4,
        num_kv_heads=2,
        ffn_dim=1408,
        vocab_size=50_304,
    ),
    "tiny": ModelConfig(
        name="tiny", num_layers=2, hidden_dim=64, num_heads=2, num_kv_heads=1, max_seq_len=64, vocab_size=512
    ),
}
"""Model by name; the names of the first ones are those of the targets. ``tiny`` is for a CPU."""


@dataclass(frozen=True)
class Flops:
    """Model FLOPs of a trained token; the two conventions differ in attention.

    Attributes:
        causal: counts the half of the attention matrix that a causal model needs.
        full: counts all of it, as PaLM does.
    """

    causal: float
    full: float


def count_flops(model: ModelConfig) -> Flops:
    """Returns the FLOPs of forward and backward at ``model.max_seq_len``, without recomputation.

    Imports :mod:`dtrain.models`, and with it torch.
    """
    from dtrain.models import train_flops_per_token

    assert model.vocab_size is not None, model
    causal = train_flops_per_token(model, model.vocab_size, model.max_seq_len)
    assert causal is not None, model
    return Flops(causal, causal + 6 * model.num_layers * model.hidden_dim * model.max_seq_len)
