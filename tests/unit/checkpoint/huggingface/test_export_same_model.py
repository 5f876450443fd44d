"""A run of ``model=hf`` becomes a folder that transformers loads with its tokenizer and samples from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import dtrain
from dtrain.checkpoint import export
from dtrain.checkpoint.huggingface.same_model import replaced
from dtrain.cli.resolve import compose
from dtrain.errors import CheckpointError, ConfigError
from dtrain.tools.checkpoint.cli import main
from dtrain.tools.plan.precision import show_plan
from dtrain.train.run import run_training
from tests.helpers.hf_models import block_network, greedy, load_hf, save_hf

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    block_network(monkeypatch)


def save_with_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    save_hf(folder, "qwen3", vocab_size=300)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(300)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    (folder / "modeling_mine.py").write_text("raise SystemExit")
    return folder


def run_keys(folder: Path, root: Path) -> list[str]:
    return [
        "data=text",
        f"data.files={root}/text.txt",
        f"data.tokenizer={folder}",
        "schedule.warmup_steps=0",
        "supervise.enabled=false",
        "launch.threads_per_rank=1",
        "model=hf",
        f"model.path={folder}",
        "model.max_seq_len=16",
        "train.steps=1",
        "train.global_batch_size=2",
        "train.micro_batch_size=2",
        "train.sample_tokens=4",
        "train.eval_batches=1",
        "precision=bf16",
        f"run_dir={root}/run",
    ]


def test_a_run_is_planned_trained_sampled_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_with_tokenizer(tmp_path / "base")
    (tmp_path / "text.txt").write_text(" ".join(f"w{number % 300}" for number in range(600)))
    config = compose(run_keys(folder, tmp_path))
    show_plan(config, folded=True)
    assert "q_norm" in capsys.readouterr().out
    assert run_training(config) == 0
    assert (tmp_path / "run" / "sample.txt").is_file()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["finished"]

    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), str(out), "--dtype", "bf16"]) == 0
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= {
        path.name for path in out.iterdir()
    }
    assert not (out / "modeling_mine.py").exists()
    weights = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in weights  # tied
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    values = json.loads((out / "config.json").read_text())
    assert values["dtype"] == "bfloat16"
    assert "torch_dtype" not in values
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert tokenizer.decode([5, 7]) == "w5 w7"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w9"}], tokenize=False) == "w9"
    assert greedy(load_hf(out), torch.tensor([[1, 2]]), 3).shape == (1, 5)

    shutil.rmtree(folder)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again")]) == 2
    assert f"is of model.path={folder}, which holds no config.json (any more)" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again"), "--base", str(out)]) == 0
    moved = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(moved[name].bfloat16(), weights[name]) for name in weights)


class _WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hf = nn.Linear(2, 2)
        self.hf.register_buffer("counts", torch.tensor([1, 2, 3]))
        self.hf.register_buffer("passing", torch.ones(1), persistent=False)

    def forward(self, x: Any) -> Any:
        return self.hf(x)


def test_persistent_buffers_keep_their_dtype(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "mine", "torch_dtype": "float16", "auto_map": {"A": "a.B"}}')
    engine = dtrain.initialize(_WithBuffers(), precision="fp32")
    model = {"factory": "dtrain.models.hf:build", "path": str(base), "args": {"hidden_size": 2}}
    engine.save(tmp_path / "run" / "checkpoints", config={"model": model})
    out = export(tmp_path / "run", tmp_path / "out", dtype="bf16")
    found = load_file(out / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "weight": torch.bfloat16, "bias": torch.bfloat16, "counts": torch.int64
    }  # fmt: skip
    assert found["counts"].tolist() == [1, 2, 3]
    assert json.loads((out / "config.json").read_text()) == {
        "model_type": "mine", "hidden_size": 2, "dtype": "bfloat16"
    }  # fmt: skip


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


def test_a_list_with_an_entry_a_layer_follows_the_number_of_layers() -> None:
    config = {"num_hidden_layers": 3, "layer_types": ["a", "b", "a"], "x": 1}
    assert replaced(config, {"num_hidden_layers": 2})["layer_types"] == ["a", "b"]
    assert replaced(config, {"num_hidden_layers": 4})["layer_types"] is None
    assert replaced(config, {"num_hidden_layers": 2, "layer_types": ["b", "b"]})["layer_types"] == ["b", "b"]
    assert replaced(config, {"x": 2}) == config | {"x": 2}
