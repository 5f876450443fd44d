"""The model of GPT-2's shape: its parts, its start, and that it learns under an engine. tests/unit/test_hf_*.py hold it
against `transformers`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.config.model import GPT2_FACTORY, ModelConfig
from dtrain.errors import ConfigError
from dtrain.models import build_model, gpt2, train_flops_per_token
from dtrain.models.gpt2 import GPT2

SMALL = ModelConfig(factory=GPT2_FACTORY, num_layers=2, hidden_dim=32, num_heads=4, max_seq_len=16)
VOCAB = 70


def build(config: ModelConfig = SMALL, vocab_size: int = VOCAB) -> GPT2:
    model = build_model(config, vocab_size, 0)
    assert isinstance(model, GPT2)
    return model


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def test_shapes_parts_and_first_weights() -> None:
    model = build()
    tokens = random_tokens(3, 16)
    output = model(tokens, random_tokens(3, 16, seed=1))
    assert output.logits.shape == (3, 16, VOCAB)
    assert {output.logits.dtype, output.loss.dtype} == {torch.float32}
    assert abs(output.loss.item() - math.log(VOCAB)) < 0.2
    assert model(tokens).loss is None
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


def test_a_later_token_never_changes_earlier_logits() -> None:
    model = build()
    tokens = random_tokens(2, 16)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(tokens).logits, model(changed).logits
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9], after[:, 9])


def test_dropout_acts_in_training_only() -> None:
    model = build(replace(SMALL, dropout=0.5))
    tokens = random_tokens(2, 16)
    assert not torch.equal(model(tokens).logits, model(tokens).logits)
    model.eval()
    assert torch.equal(model(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("options", [{"precision": "fp32"}, {"precision": "bf16", "zero_stage": 3}])
def test_it_learns_under_an_engine_whose_norms_stay_fp32(options: dict[str, object]) -> None:
    engine = dtrain.initialize(build(), optimizer=dtrain.AdamW(lr=1e-2), seed=0, **options)  # type: ignore[arg-type]
    norms = [name for name, module in engine.module.named_modules() if isinstance(module, nn.LayerNorm)]
    formats = {module.name: module.format for module in engine.contract.modules}
    assert norms
    assert {formats[name] for name in norms} == {"fp32"}
    tokens = random_tokens(4, 16)
    losses = []
    for _ in range(20):
        loss = engine(tokens=tokens[:, :-1], targets=tokens[:, 1:]).loss
        engine.backward(loss)
        losses.append(loss.item())
        assert engine.step().applied
    assert losses[-1] < 0.5 * losses[0]


def test_inconsistent_sizes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.hidden_dim=30 is not a multiple of model\.num_heads=4"):
        gpt2.build(replace(SMALL, hidden_dim=30, factory="mine:build"), VOCAB)  # as a factory of yours may
    with pytest.raises(ConfigError, match=r"ModelConfig\.args\.depth is for a ModelConfig\.factory of your own"):
        build(replace(SMALL, args={"depth": 3}))


def test_flops_agree_with_torchs_counter() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    config = replace(SMALL, vocab_size=128)
    model = build(config)
    tokens = random_tokens(2, 16)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).loss.backward()
    full_attention = 12 * 2 * 32 * 16  # the counter knows no causality: it counts the other half too
    expected = train_flops_per_token(config, VOCAB, 16)
    assert expected is not None
    assert counter.get_total_flops() / tokens.numel() == expected + full_attention // 2
