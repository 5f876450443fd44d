"""A run of ``model=hf`` becomes a folder that transformers loads with its tokenizer and samples from."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import dtrain
from dtrain.checkpoint import export
from dtrain.checkpoint.huggingface.same_model import replaced, same_config
from dtrain.cli.resolve import compose
from dtrain.config.model import Lora
from dtrain.errors import CheckpointError, ConfigError
from dtrain.planning.precision import show_plan
from dtrain.tools.checkpoint.cli import main
from dtrain.train.run import run_training
from tests.helpers.hf_models import SIZES, TOKENS, VOCAB, build_hf, load_hf, model_config, save_hf
from tests.helpers.language_models import BRIEF_RUN
from tests.helpers.net import Net

pytestmark = pytest.mark.usefixtures("no_network")

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def save_with_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    save_hf(folder, "qwen3", vocab_size=300)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(300)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    (folder / "modeling_mine.py").write_text("raise SystemExit")
    return folder


def test_a_run_is_planned_trained_sampled_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_with_tokenizer(tmp_path / "base")
    (tmp_path / "text.txt").write_text(" ".join(f"w{number % 300}" for number in range(600)))
    words = ["train.steps=1", "train.global_batch_size=2", "train.micro_batch_size=2", "train.sample_tokens=4"]
    words += ["train.eval_batches=1", "launch.threads_per_rank=1", "model=hf", "model.max_seq_len=16"]
    words += [f"model.path={folder}", f"data.files={tmp_path}/text.txt", f"data.tokenizer={folder}"]
    config = compose([*BRIEF_RUN, *words, f"run_dir={tmp_path}/run"])
    show_plan(config, folded=True)
    assert "q_norm" in capsys.readouterr().out
    assert run_training(config) == 0
    assert (tmp_path / "run" / "sample.txt").is_file()
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), str(out), "--dtype", "bf16"]) == 0
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert "modeling_mine.py" not in names
    weights = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in weights  # tied
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert tokenizer.decode([5, 7]) == "w5 w7"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w9"}], tokenize=False) == "w9"
    generated = load_hf(out).generate(torch.tensor([[1, 2]]), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert generated.shape == (1, 5)

    shutil.rmtree(folder)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again")]) == 2
    assert f"{folder} holds no config.json, and {tmp_path / 'run'}" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again"), "--base", str(out)]) == 0
    moved = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(moved[name].bfloat16(), weights[name]) for name in weights)


def test_persistent_buffers_keep_their_dtype(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "mine", "torch_dtype": "float16", "auto_map": {"A": "a.B"}}')
    hf = nn.Linear(2, 2)
    hf.register_buffer("counts", torch.tensor([1, 2, 3]))
    hf.register_buffer("passing", torch.ones(1), persistent=False)
    engine = dtrain.initialize(Net(lambda net, x: net.hf(x), hf=hf), precision="fp32")
    model = {"factory": "dtrain.models.hf:build", "path": str(base), "args": {"hidden_size": 2}}
    engine.save(tmp_path / "run" / "checkpoints", config={"model": model})
    out = export(tmp_path / "run", tmp_path / "out", dtype="bf16")
    found = load_file(out / "model.safetensors")
    dtypes = {"weight": torch.bfloat16, "bias": torch.bfloat16, "counts": torch.int64}
    assert {name: tensor.dtype for name, tensor in found.items()} == dtypes
    assert found["counts"].tolist() == [1, 2, 3]
    expected = {"model_type": "mine", "hidden_size": 2, "dtype": "bfloat16"}
    assert json.loads((out / "config.json").read_text()) == expected


def test_only_tensors_and_bases_of_model_hf_are_accepted(tmp_path: Path) -> None:
    engine = dtrain.initialize(nn.Linear(2, 2), precision="fp32")
    (tmp_path / "config.json").write_text("{}")
    model = {"factory": "dtrain.models.hf:build", "path": str(tmp_path)}
    engine.save(tmp_path / "a" / "checkpoints", config={"model": model})
    with pytest.raises(CheckpointError, match=r"'\w+' is not a tensor of its configured model, model=hf"):
        export(tmp_path / "a", tmp_path / "out")
    engine.save(tmp_path / "b" / "checkpoints", config={"model": {"factory": "dtrain.models.gpt2:build"}})
    with pytest.raises(ConfigError, match="--base is for model=hf"):
        export(tmp_path / "b", tmp_path / "out", base=tmp_path)


def test_a_model_that_was_trained_with_its_images_keeps_its_configuration(tmp_path: Path) -> None:
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": {"x": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert same_config({}, tmp_path, ["model.vision_tower.a", "model.language_model.b"]) == config
    assert same_config({}, tmp_path, None) == config
    assert same_config({}, tmp_path, ["model.b"]) == {"architectures": ["Gemma3ForCausalLM"], "x": 1}


def test_a_list_with_an_entry_a_layer_follows_the_number_of_layers() -> None:
    config = {"num_hidden_layers": 3, "layer_types": ["a", "b", "a"], "x": 1}
    assert replaced(config, {"num_hidden_layers": 2})["layer_types"] == ["a", "b"]
    assert replaced(config, {"num_hidden_layers": 4})["layer_types"] is None
    assert replaced(config, {"num_hidden_layers": 2, "layer_types": ["b", "b"]})["layer_types"] == ["b", "b"]
    assert replaced(config, {"x": 2}) == config | {"x": 2}


LORA = Lora(r=2, alpha=4, targets=["q_proj"])


def trained(path: Path | str, run: Path, lora: Lora | None = None) -> Tensor:
    """Trains one step and saves; returns the logits."""
    changes = {} if lora is None else {"lora": lora}
    source = None if lora is None else dtrain.FrozenSource(str(path))
    engine = dtrain.initialize(build_hf(path, **changes), precision="fp32", seed=0, frozen_source=source)
    for _ in range(2):  # the first step leaves lora_A as it is
        for tokens in engine.accumulate([TOKENS]):
            engine.backward(engine(tokens[:, :-1], targets=tokens[:, 1:]))
        engine.step(lr=0.01)
    engine.save(run / "checkpoints", config={"model": asdict(model_config(path, **changes))})
    engine.wait_for_save()
    with engine.eval():
        logits: Tensor = engine(TOKENS).logits
    return logits


def test_adapters_name_the_folder_of_the_run_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_hf(tmp_path / "base", "llama")
    monkeypatch.chdir(tmp_path)
    trained("base", tmp_path / "run", LORA)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = json.loads((export(tmp_path / "run", "out") / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert (export(tmp_path / "run", "merged", merge=True) / "model.safetensors").is_file()


def test_a_merge_copies_integers_of_the_folder(tmp_path: Path) -> None:
    """Older files hold masks and positions."""
    file = save_hf(tmp_path / "base", "llama") / "model.safetensors"
    masks = {
        "model.layers.0.self_attn.bias": torch.ones(1, 1, 3, 3).tril().bool(),
        "model.position_ids": torch.arange(5),
        "model.bytes": torch.arange(250, 256, dtype=torch.uint8),
    }
    save_file(load_file(file) | masks, file, metadata={"format": "pt"})
    trained(tmp_path / "base", tmp_path / "run", LORA)
    out = load_file(export(tmp_path / "run", tmp_path / "out", dtype="bf16", merge=True) / "model.safetensors")
    assert out.keys() == load_file(file).keys()
    for name, values in masks.items():
        assert out[name].dtype == values.dtype
        assert torch.equal(out[name], values)
    assert {values.dtype for name, values in out.items() if name not in masks} == {torch.bfloat16}


def save_with_images(folder: Path) -> Path:
    """Writes a model of images and text, of which ``model=hf`` builds the text half."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    text = SIZES | {"vocab_size": VOCAB, "max_position_embeddings": 32, "head_dim": 8}
    text |= {"pad_token_id": 0, "intermediate_size_mlp": 64, "num_local_experts": 2, "moe_layers": []}
    vision = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 14, "image_size": 28, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    torch.manual_seed(0)
    Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=vision)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text("{}")
    return folder


def test_the_text_half_of_a_model_of_images_and_text(tmp_path: Path) -> None:
    base = save_with_images(tmp_path / "base")
    whole = json.loads((base / "config.json").read_text())
    logits = trained(base, tmp_path / "full")
    out = export(tmp_path / "full", tmp_path / "text")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Llama4ForCausalLM"]
    assert config["model_type"] == whole["text_config"]["model_type"]
    model, info = AutoModelForCausalLM.from_pretrained(out, local_files_only=True, output_loading_info=True)
    assert type(model).__name__ == "Llama4ForCausalLM"
    assert not any(info.values())
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, logits)

    logits = trained(base, tmp_path / "run", LORA)
    out = export(tmp_path / "run", tmp_path / "merged", merge=True)
    assert json.loads((out / "config.json").read_text()) == whole
    assert (out / "preprocessor_config.json").is_file()
    own, before = load_file(out / "model.safetensors"), load_file(base / "model.safetensors")
    assert own.keys() == before.keys()
    changed = {name for name in own if not torch.equal(own[name], before[name])}
    assert changed == {name for name in before if "language_model" in name and "q_proj" in name}
    with torch.no_grad():
        assert torch.allclose(load_hf(out)(TOKENS).logits, logits, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(load_hf(base)(TOKENS).logits, logits, rtol=1e-2, atol=1e-4)
