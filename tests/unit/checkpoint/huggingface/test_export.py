"""Export to a Hugging Face folder: `transformers` computes the same logits; other models are refused."""

from __future__ import annotations

import errno
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from dtrain.checkpoint import NoCheckpointError, export, storage
from dtrain.checkpoint.huggingface import tensor_mapping
from dtrain.cli.resolve import compose
from dtrain.errors import CheckpointError, ConfigError
from dtrain.tools.checkpoint.cli import main
from dtrain.train.run import run_training
from tests.helpers.damage import R1, flip
from tests.helpers.language_models import BRIEF_RUN, GPT2, LLAMA, MODELS, TOKENS, build, save_model

TOLERANCE = 1e-5  # of the largest logit, FP32


def load(folder: Path, dtype: str | torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def relative_error(folder: Path, name: str) -> float:
    with torch.no_grad():
        expected = build(MODELS[name])(TOKENS).logits
        got = load(folder)(TOKENS).logits
    assert got.shape == expected.shape
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each model, by name."""
    root = tmp_path_factory.mktemp("saved")
    for name, model in MODELS.items():
        save_model(root / name / "checkpoints", model)
    return {name: root / name for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_gives_the_same_logits(name: str, saved: dict[str, Path], tmp_path: Path) -> None:
    folder = export(saved[name], tmp_path / "hf")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert relative_error(folder, name) < TOLERANCE
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not MODELS[name].tie_embeddings
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_the_moving_average_is_exported_on_request(saved: dict[str, Path], tmp_path: Path) -> None:
    def add_average(tensors: dict[tuple[str, str], Tensor]) -> None:
        for (_, name), tensor in list(tensors.items()):
            tensors["ema", name] = tensor + 1

    save_model(tmp_path / "run" / "checkpoints", GPT2, change=add_average)
    weights = load_file(export(tmp_path / "run", tmp_path / "weights") / "model.safetensors")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "ema"), "--weights", "ema"]) == 0
    averages = load_file(tmp_path / "ema" / "model.safetensors")
    assert averages.keys() == weights.keys()
    assert all(torch.equal(averages[name], weights[name] + 1) for name in weights)
    with pytest.raises(ConfigError, match="unknown weights 'emma'; expected master or ema; did you mean 'ema'"):
        export(tmp_path / "run", tmp_path / "hf", weights="emma")
    with pytest.raises(CheckpointError, match=r"holds no ema; it was saved by a run without ema\.decay"):
        export(saved["gpt2"], tmp_path / "hf", weights="ema")


def test_small_blocks_and_several_files(saved: dict[str, Path], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    path, folder = saved["llama-grouped-untied"], tmp_path / "deep" / "parts"
    whole = load_file(export(path, tmp_path / "whole") / "model.safetensors")
    monkeypatch.setattr(tensor_mapping, "_BLOCK_ELEMENTS", 37)
    assert main(["export", str(path), str(folder), "--max-shard-size", "30KB"]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {folder}: config.json, model-00001-of-0000")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    found: dict[str, Tensor] = {}
    for file in files:
        held = load_file(file)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 30_000
        assert all(index["weight_map"][key] == file.name for key in held)
        found |= held
    assert found.keys() == whole.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[key], whole[key]) for key in whole)
    assert relative_error(folder, "llama-grouped-untied") < TOLERANCE
    with safe_open(files[0], "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize(("short", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_low_precision_equals_the_cast(short: str, dtype: torch.dtype, saved: dict[str, Path], tmp_path: Path) -> None:
    exact = load_file(export(saved["gpt2"], tmp_path / "exact") / "model.safetensors")
    folder = export(saved["gpt2"], tmp_path / "low", dtype=short)
    low = load_file(folder / "model.safetensors")
    assert low.keys() == exact.keys()
    assert all(torch.equal(low[key].view(torch.int16), exact[key].to(dtype).view(torch.int16)) for key in exact)
    assert {parameter.dtype for parameter in load(folder, "auto").parameters()} == {dtype}


def test_a_run_names_its_vocabulary_so_that_it_can_be_exported(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("import this\n" * 200)
    small = ["model.num_layers=1", "model.hidden_dim=32", "model.num_heads=2", "model.max_seq_len=16"]
    small += ["train.steps=1", "train.sample_tokens=0", "train.micro_batch_size=16", "launch.threads_per_rank=1"]
    words = [*BRIEF_RUN, *small, f"data.files='{tmp_path}/text.txt'", f"run_dir={tmp_path}/run"]
    assert run_training(compose(words)) == 0
    model = load(export(tmp_path / "run", tmp_path / "hf"))
    assert model.config.vocab_size == 257
    assert model(TOKENS).logits.shape[-1] == 257


def test_frozen_weights_are_exported_too(tmp_path: Path) -> None:
    def freeze(tensors: dict[tuple[str, str], Tensor]) -> None:
        tensors["frozen", "norm.weight"] = tensors.pop(("master", "norm.weight")).bfloat16()

    path = save_model(tmp_path, LLAMA, change=freeze)
    exported = load_file(export(path, tmp_path / "hf") / "model.safetensors")
    assert torch.equal(exported["model.norm.weight"], build(LLAMA).norm.weight.bfloat16().float())


def test_a_weight_beyond_the_dtype_is_named_with_one_that_holds_it(tmp_path: Path) -> None:
    for value, dtype, suggested in ((-7e4, "fp16", "fp32 or bf16"), (3.4e38, "fp16", "fp32"), (3.4e38, "bf16", "fp32")):

        def enlarge(tensors: dict[tuple[str, str], Tensor], value: float = value) -> None:
            tensors["master", "blocks.1.ffn.down.weight"][3, 5] = value

        path = save_model(tmp_path / f"{dtype}{value}", LLAMA, change=enlarge)
        with pytest.raises(CheckpointError, match=rf"'blocks\.1\.ffn\.down\.weight' holds .* export as {suggested}$"):
            export(path, tmp_path / "hf", dtype=dtype)
        assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("operation", ["create", "write", "rename", "sync_directory"])
def test_file_error_leaves_nothing(operation: str, saved: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
    real = getattr(storage, operation)
    calls = []

    def refuse(*arguments: Any) -> Any:
        if operation != "sync_directory" or arguments == (tmp_path,):  # the latter after the rename, which is reverted
            calls.append(arguments)
            raise OSError(errno.EROFS, "Read-only file system", "x")
        return real(*arguments)

    monkeypatch.setattr(storage, operation, refuse)
    with pytest.raises(CheckpointError, match=r"hf cannot be written: Read-only file system \(errno 30\)"):
        export(saved["llama"], tmp_path / "hf")
    assert calls
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_model(tmp_path / "run", LLAMA)
    flip(R1, 1)(path)
    assert main(["export", str(path), str(tmp_path / "hf")]) == 1
    assert re.match(rf"dtrain: {path / R1}: (blake3|sha256) differs \(expected ", capsys.readouterr().err)
    assert [item.name for item in tmp_path.iterdir()] == ["run"]


def told(**changes: Any) -> dict[str, Any]:
    return {"config": {"model": asdict(LLAMA) | changes}}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (told(factory="mine.net:build"), "model.factory=mine.net:build cannot be exported"),
        ({}, "does not name its model"),
        (told(vocab_size=None), r"does not state its vocabulary size \(model.vocab_size\)"),
        (told(depth=3), "the model has the unknown key 'depth'"),
        (told(num_layers="2"), "num_layers is '2', expected an integer of at least 1"),
        (told(num_layers=1 << 39), "its tensors are not those of its configured model"),
        (told(num_layers=3), r"'blocks\.2\.attn\.out\.weight' is absent, expected \[32, 32\]"),
        (told(num_kv_heads=1), r"'blocks\.0\.attn\.qkv\.weight' is \[96, 32\], expected \[48, 32\]"),
        (told(vocab_size=321), r"model.vocab_size=321, and 'embed.weight' has 320 rows"),
        (told(rope_theta=1e308), "rope_theta is 1e\\+308, expected a number of at least 0"),
    ],
)
def test_model_that_is_not_exportable_is_refused(state: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = save_model(tmp_path / "run", LLAMA, state=state)
    with pytest.raises(CheckpointError, match=message):
        export(path, tmp_path / "hf")
    assert [item.name for item in tmp_path.iterdir()] == ["run"]


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_model(tmp_path / "run", GPT2)
    out = tmp_path / "hf"
    with pytest.raises(ConfigError, match="unknown export format 'gguf'"):
        export(path, out, format="gguf")
    with pytest.raises(ConfigError, match="unknown dtype 'fp8'"):
        export(path, out, dtype="fp8")
    with pytest.raises(CheckpointError, match="is inside the checkpoint"):
        export(path, path / "hf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoCheckpointError):
        export(tmp_path / "empty", out)
    out.mkdir()
    assert main(["export", str(path), str(out)]) == 2
    assert "exists; an export creates a new folder" in capsys.readouterr().err
    assert list(out.iterdir()) == []
    for arguments in (["/no/such", "x"], [str(path)], [str(path), "x", "--max-shard-size", "5 elephants"]):
        assert main(["export", *arguments]) == 2
    assert "'5 elephants' is not a size; write 500MB or 5GB" in capsys.readouterr().err
