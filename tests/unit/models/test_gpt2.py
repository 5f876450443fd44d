"""The model of GPT-2's shape: its parts, its start, and that it learns under an engine. tests/unit/models/test_hf.py
holds it against `transformers`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dtrain.config.model import GPT2_FACTORY, ModelConfig
from dtrain.models import build_model
from dtrain.models.gpt2 import GPT2

SMALL = ModelConfig(factory=GPT2_FACTORY, num_layers=2, hidden_dim=32, num_heads=4, max_seq_len=16)
VOCAB = 70


def build(config: ModelConfig = SMALL) -> GPT2:
    model = build_model(config, VOCAB, 0)
    assert isinstance(model, GPT2)
    return model


def test_parts_and_first_weights() -> None:
    model = build()
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.shape == (128, 32)
    assert build(replace(SMALL, tie_embeddings=False)).head.weight is not model.embed.weight
    assert build(replace(SMALL, ffn_dim=40)).blocks[0].ffn.up.out_features == 40
    assert model.blocks[0].ffn.up.out_features == 128
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert bool((parameter == 1).all()), name
        else:
            expected = 0.02 / 2 if name.endswith(("attn.out.weight", "ffn.down.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.1), name


def test_gpt2_small_has_its_published_number_of_parameters() -> None:
    sizes = replace(SMALL, num_layers=12, hidden_dim=768, num_heads=12, max_seq_len=1024, vocab_size=50257)
    with torch.device("meta"):
        model = build(sizes)
    padding = (50304 - 50257) * 768
    assert sum(parameter.numel() for parameter in model.parameters()) - padding == 124_439_808
