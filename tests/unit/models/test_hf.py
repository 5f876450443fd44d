from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtrain
from dtrain.errors import ConfigError
from dtrain.models import attention_shape, build_model, train_flops_per_token, vocabulary
from dtrain.models import hf as hf_module
from dtrain.parameters.groups import decayed_names, find_units
from tests.helpers.hf_models import FAMILIES, TOKENS, VOCAB, build_hf, load_hf, model_config, save_hf

INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_under_engines(family: str, folders: dict[str, Path]) -> None:
    """In FP32 with the bits of transformers; in BF16 with norms and routers in FP32; each layer is a unit."""
    theirs, model = load_hf(folders[family]), build_hf(folders[family])
    for name, parameter in theirs.named_parameters():  # FP32, although config.json says BF16
        assert torch.equal(model.get_parameter(f"hf.{name}"), parameter), name
    layers = "hf.transformer.h" if family == "gpt2" else "hf.model.layers"
    assert find_units(model, "auto") == [f"{layers}.0", f"{layers}.1"]
    decayed = {name.rpartition(".")[0].rpartition(".")[2] for name in decayed_names(model)}
    assert family != "mixtral" or "gate" in decayed  # a router's weight is a matrix
    engine = dtrain.initialize(model, precision="fp32")
    with engine.eval():
        output = engine(INPUTS, targets=TARGETS)
    with torch.no_grad():
        logits = theirs(INPUTS).logits
    assert torch.equal(output.logits, logits)
    assert output.loss == F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), reduction="sum") / TARGETS.numel()

    engine = dtrain.initialize(build_hf(folders[family]), precision="bf16", zero_stage=3)
    kept = {name.rpartition(".")[0] for name, dtype in engine.contract.replica_dtypes.items() if dtype is torch.float32}
    types = {name: type(module).__name__.lower() for name, module in engine.module.named_modules()}
    assert kept == {name for name, kind in types.items() if "norm" in kind or "router" in kind}
    for tokens in engine.accumulate([TOKENS]):
        output = engine(tokens[:, :-1], targets=tokens[:, 1:])
        assert output.logits.dtype == torch.float32
        engine.backward(output)
    assert engine.step().applied


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_do_not_see_each_other(family: str, folders: dict[str, Path]) -> None:
    model = build_hf(folders[family]).eval()
    lengths = (5, 8, 3)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    with torch.no_grad():
        packed = model(INPUTS, positions=positions).logits
        alone = torch.cat([model(part).logits for part in INPUTS.split(lengths, dim=1)], dim=1)
        across = model(INPUTS).logits
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(packed, across, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("model_type", "vocab_size"), [("opt", VOCAB), ("opt", 6), ("mamba", VOCAB)])
def test_a_model_that_cannot_keep_documents_apart_is_refused(model_type: str, vocab_size: int, tmp_path: Path) -> None:
    # opt ignores positions, and of 6 tokens one is its padding; mamba carries a state
    sizes = {"opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "num_attention_heads": 4}, "mamba": {}}[model_type]
    config = {"model_type": model_type, "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": vocab_size, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = build_model(model_config(tmp_path, weights="random"), vocab_size, seed=0)
    inputs = INPUTS % vocab_size
    assert model(inputs, targets=TARGETS % vocab_size).loss.isfinite()
    with pytest.raises(ConfigError, match=rf"{model_type} cannot keep .*; train it on .* data\.documents=cross"):
        model(inputs, positions=torch.arange(16).expand(2, -1))


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    config = {"model_type": "bert", "vocab_size": VOCAB, "is_decoder": True, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    build_hf(tmp_path, weights="random")
    edit(is_decoder=False)(tmp_path)
    with pytest.raises(ConfigError, match=r"model_type bert is not causal with this config\.json: .*set is_decoder"):
        build_hf(tmp_path, weights="random")


def test_tensors_without_a_place_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_hf(tmp_path / "llama", "llama")
    edit(num_hidden_layers=1)(folder)
    with caplog.at_level("INFO", "dtrain"):
        build_hf(folder)
    assert "LlamaForCausalLM has no place for 9 tensors of the files, such as 'model.layers.1." in caplog.text


def test_random_weights_follow_the_seed_and_the_replaced_entries(folders: dict[str, Path]) -> None:
    changes: dict[str, Any] = {"weights": "random", "args": {"num_hidden_layers": 1, "intermediate_size": 48}}
    first, again = (build_hf(folders["qwen3"], **changes) for _ in range(2))
    weights = dict(first.named_parameters())
    assert all(torch.equal(weights[name], p) for name, p in again.named_parameters())
    assert find_units(first, "auto") == ["hf.model.layers.0"]
    assert first.get_parameter("hf.model.layers.0.mlp.up_proj.weight").shape == (48, 32)
    assert {p.dtype for p in first.parameters()} == {torch.float32}


def test_the_shape_of_attention_is_that_of_the_folder(folders: dict[str, Path]) -> None:
    for family in ("llama", "qwen3", "gpt2"):
        found = attention_shape(model_config(folders[family]))
        model: Any = build_model(model_config(folders[family]), VOCAB, 0)
        config = model.hf.config
        kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        assert found is not None
        assert found[:3] == (config.num_attention_heads, kv_heads, config.hidden_size // config.num_attention_heads)
        assert found.dropout == 0.0, "GPT-2 has others that are not 0"
    assert attention_shape(model_config(folders["gpt2"], args={"attn_pdrop": 0.2}, weights="random")) == (4, 4, 8, 0.2)
    windowed = model_config(folders["mixtral"], args={"sliding_window": 4}, weights="random")
    assert attention_shape(windowed) is None, "transformers makes a mask"


def test_flops_count_the_products(folders: dict[str, Path]) -> None:
    attention = 6 * 2 * 32 * 16  # layers, width, length
    for family in ("llama", "qwen3"):  # one is tied
        layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64
        matmuls = 6 * (2 * layer + VOCAB * 32)
        both = matmuls + attention, matmuls + 2 * attention
        assert train_flops_per_token(model_config(folders[family]), VOCAB, 16) == both
    matmuls = 6 * (2 * 12 * 32 * 32 + VOCAB * 32)
    both = matmuls + attention, matmuls + 2 * attention
    assert train_flops_per_token(model_config(folders["gpt2"]), VOCAB, 16) == both
    assert train_flops_per_token(model_config(folders["mixtral"]), VOCAB, 16) is None


def edit(**changes: Any) -> Callable[[Path], None]:
    """Returns what changes entries of the config.json of a folder, or removes those that are ``...``."""

    def edited(folder: Path) -> None:
        path = folder / "config.json"
        entries = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in entries.items() if value is not ...}))

    return edited


def _drop_a_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def to_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "changes", "message"),
    [
        (None, {"folder": "/nowhere/llama"}, "/nowhere/llama is not a directory"),
        (lambda folder: (folder / "config.json").unlink(), {}, r"config\.json: missing"),
        (lambda folder: (folder / "config.json").write_text("{"), {}, r"config\.json"),
        (edit(model_type="mine", auto_map={}), {}, "has no model_type 'mine'; its own Python files"),
        (edit(model_type="t5"), {"weights": "random"}, "t5 is no causal language model"),
        (edit(quantization_config={"bits": 4}), {}, r"quantized \(quantization_config\)"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), {}, "holds an adapter"),
        (None, {"max_seq_len": 33}, r"model\.max_seq_len=33 is more than the 32 positions"),
        (None, {"weights": "random", "args": {"num_layers": 2}}, r"model\.args\.num_layers is no entry .*num_hidden"),
        (None, {"weights": "random", "args": {"hidden_size": 33}}, r"(json is not valid|cannot build the model)"),
        (_drop_a_weight, {}, r"its weights lack 'model\.norm\.weight' \(in all 1\) of LlamaForCausalLM"),
        (to_pickle, {}, r"has neither model\.safetensors nor .*; pytorch_model\.bin is not read because"),
        (_cut, {}, r"model\.safetensors"),
        (edit(vocab_size=256), {}, r"another shape for 'lm_head\.weight' \(in all 2\) of Llama"),
    ],
)
def test_a_mistake_is_one_line(damage: Any, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "llama", "llama")
    if damage is not None:
        damage(folder)
    with pytest.raises(ConfigError, match=message) as caught:
        build_hf(**{"folder": folder} | changes)
    assert "\n" not in str(caught.value)


def test_the_vocabulary_is_the_models_own(folders: dict[str, Path]) -> None:
    config = model_config(folders["llama"])
    assert vocabulary(config, 100) == VOCAB
    with pytest.raises(ConfigError, match=rf"has {VOCAB} tokens, fewer than the data's 257; tokenize"):
        vocabulary(config, 257)
    with pytest.raises(ConfigError, match=r"model\.vocab_size=64 and the vocabulary of .* of 128 tokens differ"):
        vocabulary(model_config(folders["llama"], vocab_size=64), 10)


def test_without_transformers_the_pip_line_is_named(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'dtrain[hf]'")):
        build_hf(folders["llama"])
