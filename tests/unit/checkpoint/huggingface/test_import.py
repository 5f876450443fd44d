from __future__ import annotations

import json
import os
import shlex
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import dtrain
from dtrain.checkpoint import export, import_hf, verify
from dtrain.cli.resolve import compose
from dtrain.config.model import ModelConfig
from dtrain.errors import CheckpointError
from dtrain.models import build_model
from dtrain.tools.checkpoint.cli import main
from tests.faults.test_checkpoint_damage import instead
from tests.helpers.damage import change
from tests.helpers.language_models import MODELS, TOKENS, save_model
from tests.unit.models.test_hf import edit, to_pickle

TOLERANCE = 1e-6  # of the loss, FP32
Change = Callable[[Path], Any]
WEIGHTS = "model.safetensors"


def seeded(model_class: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    return model


def llama(**options: Any) -> Any:
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return seeded(LlamaForCausalLM, LlamaConfig(**{**sizes, **heads, "tie_word_embeddings": False, **options}))


def gpt2(**options: Any) -> Any:
    sizes = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    return seeded(GPT2LMHeadModel, GPT2Config(**{**sizes, "bos_token_id": None, "eos_token_id": None, **options}))


THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
SOURCES: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(**THETA),
    "llama-tied": lambda: llama(tie_word_embeddings=True, num_key_value_heads=4, rms_norm_eps=1e-3, vocab_size=320),
    "gpt2": gpt2,
    "gpt2-untied": lambda: gpt2(tie_word_embeddings=False, n_inner=48, layer_norm_epsilon=1e-3),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`llama` and `gpt2` as transformers writes them."""
    folder = tmp_path_factory.mktemp("originals")
    for name in ("llama", "gpt2"):
        SOURCES[name]().save_pretrained(folder / name)
    return folder


@pytest.fixture
def copy(originals: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one of them, to be changed."""

    def make(name: str) -> Path:
        folder = tmp_path / "hf"
        folder.mkdir()
        for file in (originals / name).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    return make


def engine_of(model: ModelConfig, run_dir: Path) -> Any:
    engine = dtrain.initialize(build_model(model, 257, seed=1), precision="fp32", seed=0)
    engine.load(run_dir)
    return engine


@pytest.mark.parametrize("name", SOURCES)
def test_an_imported_model_has_the_same_loss_and_trains(name: str, tmp_path: Path) -> None:
    source = SOURCES[name]()
    source.save_pretrained(tmp_path / "hf", max_shard_size="20KB" if name == "llama" else "1GB")
    imported = import_hf(tmp_path / "hf", tmp_path / "run")
    assert imported.checkpoint == tmp_path / "run" / "checkpoints" / "step-00000000"
    assert verify(tmp_path / "run").ok
    with torch.no_grad():
        expected = source(TOKENS, labels=TOKENS).loss.item()
    engine = engine_of(imported.model, tmp_path / "run")
    batch = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
    with engine.eval():
        assert engine(**batch).loss.item() == pytest.approx(expected, rel=TOLERANCE)
    for _ in range(5):
        engine.backward(engine(**batch).loss)
        assert engine.step().applied
    with engine.eval():
        assert engine(**batch).loss.item() < expected - 0.01


@pytest.mark.parametrize("name", MODELS)
def test_export_after_import_is_bit_equal(name: str, tmp_path: Path) -> None:
    save_model(tmp_path / "run" / "checkpoints", MODELS[name])
    first = export(tmp_path / "run", tmp_path / "first")
    imported = import_hf(first, tmp_path / "again")
    second = export(tmp_path / "again", tmp_path / "second")
    for file in ("config.json", "model.safetensors"):
        assert (first / file).read_bytes() == (second / file).read_bytes()
    given = replace(MODELS[name], name=imported.model.name, ffn_dim=imported.model.ffn_dim)
    assert imported.model == given


def test_printed_command(originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / """my run, a=b; it's q"uo${x}[a]{b}*?|: c\\"""  # quoted for the shell and for Hydra
    assert main(["import", str(originals / "llama"), str(run_dir)]) == 0
    first, command = capsys.readouterr().out.splitlines()
    assert first == f"wrote {run_dir}/checkpoints/step-00000000; train it with"
    words = shlex.split(command)
    assert words[:2] == ["dtrain", "train"]
    config = compose(words[2:])
    assert Path(config.run_dir or "") == run_dir
    engine_of(config.model, run_dir)


def test_older_file_layouts_of_the_same_model_are_read(copy: Callable[[str], Path], tmp_path: Path) -> None:
    """As on the hub: no prefix, derived buffers, a stored tied head."""
    folder = copy("gpt2")
    file = folder / "model.safetensors"
    # clones, because the file that load_file maps is written again below
    tensors = {name.removeprefix("transformer."): value.clone() for name, value in load_file(file).items()}
    expected = dict(tensors)
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 16, 16).tril().bool()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    for key in ("tie_word_embeddings", "n_inner", "layer_norm_epsilon", "scale_attn_weights", "add_cross_attention"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    import_hf(folder, tmp_path / "run")
    exported = load_file(export(tmp_path / "run", tmp_path / "out") / "model.safetensors")
    assert all(torch.equal(exported[f"transformer.{name}"], value) for name, value in expected.items())

    tensors["lm_head.weight"] += 1
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' differs from 'wte.weight', but config.json ties"):
        import_hf(folder, tmp_path / "other")


def test_half_precision_weights_behind_links_of_a_download_cache(copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy("llama")
    low = {name: value.half() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(low, folder / "model.safetensors")
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.symlink_to(file.rename(tmp_path / "blobs" / str(number)))
    import_hf(folder, tmp_path / "run")
    exported = load_file(export(tmp_path / "run", tmp_path / "out") / "model.safetensors")
    assert all(torch.equal(exported[name], value.float()) for name, value in low.items())


def test_null_counts_as_absent(tmp_path: Path) -> None:
    llama(num_key_value_heads=4, **THETA).save_pretrained(tmp_path / "hf")
    nulls = ("num_key_value_heads", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "rope_scaling")
    edit(**dict.fromkeys(nulls))(tmp_path / "hf")
    model = import_hf(tmp_path / "hf", tmp_path / "run").model
    assert (model.num_kv_heads, model.rope_theta, model.norm_eps) == (None, 500.0, 1e-6)


def test_the_seed_of_the_run_stays(originals: Path, tmp_path: Path) -> None:
    imported = import_hf(originals / "gpt2", tmp_path / "run")
    engine = dtrain.initialize(build_model(imported.model, 257, seed=1), precision="fp32", seed=7)
    engine.load(tmp_path / "run")
    assert engine.seed == 7
    engine.save(tmp_path / "saved")
    assert engine_of(imported.model, tmp_path / "saved").seed == 7


def weights(folder: Path, **changes: Any) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | changes, file)


def index(folder: Path, content: Any) -> None:
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def mapped(folder: Path, **changes: str) -> dict[str, Any]:
    return {"weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), "part.safetensors") | changes}


SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
LINEAR = {"rope_type": None, "type": "linear", "factor": 2.0}
UNSUPPORTED: list[tuple[str, Change, str]] = [
    ("llama", edit(model_type="mistral"), "model_type 'mistral' cannot be imported; supported are llama"),
    ("llama", edit(rope_parameters=SCALED), "rope_parameters .*llama3.* cannot be imported: .* plain rotary"),
    ("llama", edit(rope_scaling=LINEAR), "rope_scaling .*linear.* cannot be"),
    ("llama", edit(attention_bias=True), "attention_bias True cannot be imported; dtrain's model has False"),
    ("llama", edit(hidden_act="gelu"), "hidden_act 'gelu' cannot be imported; dtrain's model has 'silu'"),
    ("llama", edit(head_dim=16), "head_dim 16 cannot be imported; dtrain's model has 8 there"),
    ("llama", edit(quantization_config={"bits": 4}), "quantization_config .* cannot be imported"),
    ("llama", edit(num_attention_heads=5), "do not fit together"),
    ("llama", edit(hidden_size=...), "hidden_size is None, expected an integer of at least 1"),
    ("llama", edit(num_hidden_layers=0), "num_hidden_layers is 0, expected an integer of at least 1"),
    ("llama", edit(num_hidden_layers=10**9), "config.json states 1000000000 layers"),
    ("llama", edit(num_hidden_layers=3), "has no tensor 'model.layers.2.input_layernorm.weight'"),
    ("llama", edit(vocab_size=301), r"'model.embed_tokens.weight' has shape \[300, 32\], .* \[301, 32\]"),
    ("llama", edit(rms_norm_eps=10**400), "rms_norm_eps is 1000.*, expected a number of at least 0"),
    ("llama", edit(tie_word_embeddings=True), "'lm_head.weight' differs from 'model.embed_tokens.weight'"),
    ("gpt2", edit(activation_function="relu"), "activation_function 'relu' cannot be imported"),
    ("gpt2", edit(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx True cannot be"),
    ("gpt2", edit(n_head=5), "n_embd 32 is not a multiple of n_head 5"),
    ("gpt2", edit(tie_word_embeddings=False), "has no tensor 'lm_head.weight'"),
]
HOSTILE: list[tuple[Change, str]] = [
    (lambda folder: (folder / "config.json").unlink(), r"config.json: missing"),
    (lambda folder: (folder / "config.json").write_text("[]"), "config.json: expected a JSON object, got list"),
    (instead(lambda path: path.symlink_to(path.name), "config.json"), "config.json: not a regular file"),
    (to_pickle, "pytorch_model.bin is not read because such files can run code"),
    (instead(os.mkfifo, WEIGHTS), "model.safetensors: not a regular file"),
    (change(WEIGHTS, lambda data: struct.pack("<Q", 1 << 60)), r"a header of \d+ bytes does not fit"),
    (lambda folder: os.truncate(folder / WEIGHTS, 40_000), "its tensors end at byte|its tensors"),
    (lambda folder: index(folder, mapped(folder, x="../../secret.safetensors")), "'x' is in '../../secret.safe"),
    (lambda folder: index(folder, mapped(folder, x="pytorch_model.bin")), "not a safetensors file of this"),
    (lambda folder: index(folder, mapped(folder, x="part.safetensors")), "do not agree on the location of 'x'"),
    (lambda folder: weights(folder, **{"model.norm.weight": torch.full((32,), torch.nan)}), "holds Inf or NaN"),
    (lambda folder: weights(folder, **{"model.norm.weight": torch.ones(32).int()}), "int32; supported are FP32"),
    (lambda folder: weights(folder, evil=torch.ones(3)), "'evil' is not a tensor of the model"),
]


@pytest.mark.parametrize(("name", "change", "message"), [*UNSUPPORTED, *(("llama", *case) for case in HOSTILE)])
def test_an_unsupported_model_or_hostile_folder_is_refused_in_one_line(
    name: str, change: Change, message: str, copy: Callable[[str], Path], tmp_path: Path, capsys: Any
) -> None:
    folder = copy(name)
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        import_hf(folder, tmp_path / "run")
    assert main(["import", str(folder), str(tmp_path / "run")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("dtrain: ")
    assert output.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_used_run_directory_is_refused(originals: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    import_hf(originals / "llama", run_dir)
    with pytest.raises(CheckpointError, match=r"run holds checkpoints/step-0{8}/.* already; an import starts a run"):
        import_hf(originals / "gpt2", run_dir)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file cannot be listed: Not a directory"):
        import_hf(originals / "gpt2", tmp_path / "file")
    with pytest.raises(CheckpointError, match="is not a directory; give the folder that holds"):
        import_hf(tmp_path / "gone", tmp_path / "other")
