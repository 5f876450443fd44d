from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtrain
from dtrain.cli.resolve import compose
from dtrain.config.model import GPT2_FACTORY, ModelConfig
from dtrain.errors import ConfigError
from dtrain.models import build_model
from dtrain.models.loss_head import _tell
from dtrain.tasks import generate
from dtrain.train.setup import check_patterns
from tests.helpers.hf_models import VOCAB as HF_VOCAB
from tests.helpers.hf_models import model_config
from tests.helpers.oracle import normwise_error

VOCAB = 70
SMALL = ModelConfig(num_layers=1, hidden_dim=32, num_heads=4, max_seq_len=16)
TOKENS = torch.randint(VOCAB, (3, 17), generator=torch.Generator().manual_seed(0))
INPUTS = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
TERMS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-2}


def loss_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    output = model(**INPUTS)
    output.loss.backward()
    return output.loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(chunked: nn.Module, full: nn.Module) -> None:
    own, other = loss_and_gradients(chunked), loss_and_gradients(full)
    assert own[0].item() == pytest.approx(other[0].item(), rel=1e-6)
    assert own[1].keys() == other[1].keys()
    joined = [torch.cat([grad.flatten() for grad in grads.values()]) for _, grads in (own, other)]
    assert normwise_error(*joined) < 1e-6


@pytest.mark.parametrize(
    ("factory", "tied", "terms"),
    [(SMALL.factory, True, {}), (SMALL.factory, False, TERMS), (GPT2_FACTORY, True, TERMS)],
)
def test_training_by_chunks_is_training_without_logits(factory: str, tied: bool, terms: dict[str, Any]) -> None:
    config = replace(SMALL, factory=factory, tie_embeddings=tied, **terms)
    chunked, full = (build_model(replace(config, loss_chunk=chunk), VOCAB, seed=0) for chunk in (10, "none"))
    assert chunked(**INPUTS).logits is None
    assert chunked(INPUTS["tokens"]).logits is not None, "there is no loss without targets"
    assert_same(chunked, full)
    for model in (chunked, full):
        model.eval()
        output = model(**INPUTS)
        assert output.logits.shape == (3, 16, VOCAB)
        plain = F.cross_entropy(output.logits.flatten(0, 1), INPUTS["targets"].flatten())
        assert output.loss.item() == pytest.approx(plain.item(), rel=1e-6), "validation is the plain cross entropy"
    drawn = generate(chunked, TOKENS[:, :3], 2, 16, torch.Generator().manual_seed(0))
    assert drawn.shape == (3, 5)


def test_auto_needs_more_tokens_than_the_hidden_dim_and_a_larger_vocabulary() -> None:
    model = build_model(replace(SMALL, loss_chunk="auto"), VOCAB, seed=0)
    assert model(**INPUTS).logits is None
    assert model(INPUTS["tokens"][:, :10], INPUTS["targets"][:, :10]).logits is not None, "30 tokens, hidden dim 32"
    assert build_model(replace(SMALL, loss_chunk="auto"), 32, seed=0)(*[TOKENS % 32] * 2).logits is not None


def planted(kind: str) -> nn.Module:
    model = build_model(replace(SMALL, loss_chunk="auto", tie_embeddings=False), VOCAB, seed=0)
    if kind == "hook":
        model.head.register_forward_hook(lambda *_: None)
    elif kind == "forward":
        model.head.forward = lambda x: F.linear(x, model.head.weight)
    else:
        nn.utils.parametrizations.weight_norm(model.head)
    return model


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("hook", "has hooks"), ("forward", "has a forward of its own"), ("class", "is a ParametrizedLinear, not a plain")],
)
def test_a_head_that_must_be_called_gives_logits_or_is_refused(kind: str, reason: str, caplog: Any) -> None:
    _tell.cache_clear()
    model = planted(kind)
    with caplog.at_level(logging.INFO, logger="dtrain"):
        assert [model(**INPUTS).logits is None for _ in range(2)] == [False, False]
    (message,) = caplog.messages
    assert message.startswith("model.loss_chunk=auto: the loss is computed from full logits, because 'head' " + reason)
    model.loss_head = replace(model.loss_head, chunk=8)
    with pytest.raises(ConfigError, match=f"model.loss_chunk=8: the output layer 'head' {reason}"):
        model(**INPUTS)


@pytest.mark.parametrize(("wanted", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16)])
def test_a_rule_for_the_head_is_followed(wanted: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    own = F.softmax
    monkeypatch.setattr(torch, "softmax", lambda x, *args, **kwargs: (seen.append(x.dtype), own(x, *args, **kwargs))[1])
    policy = dtrain.PrecisionPolicy.named("bf16", rules={"head": wanted})
    model = build_model(replace(SMALL, loss_chunk=8, tie_embeddings=False), VOCAB, seed=0)
    engine = dtrain.initialize(model, precision=policy, seed=0)
    engine.backward(engine(**INPUTS))
    assert set(seen) == {dtype}
    assert engine.step().applied


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["precision=fp8", "precision.rules={head: fp8}"], "model.loss_chunk=8: the output layer 'head' is FP8"),
        (["telemetry.activations=[head]", "telemetry.precision_every=1"], "activations: 'head' has no output with m"),
    ],
)
def test_refusals_before_the_run_starts(keys: list[str], message: str) -> None:
    config = compose(["experiment=smoke", "precision=bf16", "model.tie_embeddings=false", "model.loss_chunk=8", *keys])
    model = build_model(config.model, 256, seed=0)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_patterns(config, model)


def test_models_of_transformers(folders: dict[str, Path]) -> None:
    config = replace(model_config(folders["llama"]), **TERMS)
    chunked, full = (build_model(replace(config, loss_chunk=chunk), HF_VOCAB, seed=0) for chunk in (10, "none"))
    assert chunked(**INPUTS).logits is None
    assert_same(chunked, full)
    assert chunked.loss_head.name == "hf.lm_head"
    chunked.eval()
    assert torch.equal(chunked(**INPUTS).logits, full.eval()(**INPUTS).logits)


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_model_that_changes_its_logits_is_found(tmp_path: Path, on_meta: bool) -> None:
    """Gemma2 caps them by a tanh, at 30, which changes small ones by less than FP32 shows."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Gemma2Config(**sizes, head_dim=8, intermediate_size=64, vocab_size=HF_VOCAB)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with torch.device("meta" if on_meta else "cpu"):
        model = build_model(replace(model_config(tmp_path), loss_chunk="auto"), HF_VOCAB, seed=0)
        assert "changes its logits" in model.loss_head.unsupported_reason
        with pytest.raises(ConfigError, match=r"model.loss_chunk=64: the output layer 'hf.lm_head' is not the last"):
            build_model(replace(model_config(tmp_path), loss_chunk=64), HF_VOCAB, seed=0)
    if not on_meta:
        assert model(**INPUTS).logits is not None


class Own(nn.Module):
    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.chunk_rows = config.loss_chunk
        self.embed = nn.Embedding(vocab_size, 8)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return dtrain.linear_cross_entropy(self.embed(tokens), self.embed.weight, targets, chunk_rows=self.chunk_rows)


class Using(Own):
    uses_loss_keys = True


def test_a_factory_of_ones_own_must_say_that_it_uses_the_keys() -> None:
    config = replace(SMALL, factory=f"{__name__}:Own", loss_chunk=4)
    with pytest.raises(ConfigError, match=r"model.loss_chunk=4 has no effect on the Own of .*linear_cross_entropy"):
        build_model(config, VOCAB, seed=0)
    with pytest.raises(ConfigError, match=r"model.z_loss=0.1 has no effect on the Own"):
        build_model(replace(config, loss_chunk="none", z_loss=0.1), VOCAB, seed=0)
    assert build_model(replace(config, factory=f"{__name__}:Using"), VOCAB, seed=0)(**INPUTS).dim() == 0
