from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from dtrain.cli.compose import config_folder
from dtrain.cli.resolve import compose
from dtrain.config.dump import HASH_EXCLUDES, config_hash, config_to_dict, to_yaml
from dtrain.config.model import DEFAULT_FACTORY, GPT2_FACTORY
from dtrain.config.optim import TorchOptimizer
from dtrain.config.schema import GROUP_OPTIONS, RunConfig
from tests.unit.cli.regenerate_golden import GOLDEN, cases, resolved

ROOT = Path(__file__).parents[3]
OPTIONS = sorted((path.parent.name, path.stem) for path in config_folder().glob("*/*.yaml"))
NEEDS = {
    ("data", "text"): ["data.files=*.txt"],
    ("data", "tokens"): ["data.path=tokens"],
    ("data", "chat"): ["data.files=*.jsonl", "data.tokenizer=model"],
    ("data", "images"): ["data.path=photos", "model=convnet"],
    ("data", "glyphs"): ["model=vit"],
    ("data", "arrays"): ["data.path=a.safetensors", "model=mlp"],
    ("data", "friedman"): ["model=mlp"],
    ("model", "hf"): ["model.path=model"],
    ("model", "convnet"): ["data=glyphs"],
    ("model", "vit"): ["data=glyphs"],
    ("model", "mlp"): ["data=friedman"],
    ("model", "denoiser"): ["data=glyphs", "data.task=denoising"],
    ("schedule", "wsd"): ["schedule.decay_steps=10"],
}


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes(group: str, option: str) -> None:
    config = compose([f"{group}={option}", *NEEDS.get((group, option), [])])
    record = getattr(config, group, None)
    if group in GROUP_OPTIONS:
        assert type(record) is GROUP_OPTIONS[group][option]
    if hasattr(record, "name"):
        assert record.name == option


def test_yaml_and_schema_list_the_same_options() -> None:
    for group, options in GROUP_OPTIONS.items():
        assert {name for folder, name in OPTIONS if folder == group} == set(options)
    names = {"auto", "fp32", "tf32", "bf16", "fp16", "fp8"}
    assert {name for folder, name in OPTIONS if folder == "precision"} == names


def test_yaml_of_groups_only_picks_and_overrides() -> None:
    for path in config_folder().rglob("*.yaml"):
        assert "_target_" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(cases()))
def test_golden(name: str) -> None:
    stored = (GOLDEN / f"{name}.yaml").read_text(encoding="utf-8")
    assert resolved(cases()[name]) == stored, "run `python -m tests.unit.cli.regenerate_golden` if this is on purpose"


def test_no_stale_golden_file() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(cases())


def test_default_is_the_schema_default() -> None:
    config = compose()
    assert config == RunConfig()
    assert isinstance(config.optim.betas, tuple)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


def test_model_presets_have_the_published_shapes() -> None:
    keys = ("num_layers", "hidden_dim", "num_heads", "num_kv_heads", "ffn_dim", "max_seq_len", "rope_theta")
    shapes = {
        "gpt2-124m": ((12, 768, 12, None, None, 1024, 10000.0), True),
        "llama-1b": ((16, 2048, 32, 8, 8192, 2048, 500000.0), True),
        "llama-3b": ((28, 3072, 24, 8, 8192, 4096, 500000.0), True),
        "llama-8b": ((32, 4096, 32, 8, 14336, 8192, 500000.0), False),
    }
    for name, (shape, tied) in shapes.items():
        model = compose([f"model={name}"]).model
        assert tuple(getattr(model, key) for key in keys) == shape
        assert model.tie_embeddings is tied
        assert model.factory == (GPT2_FACTORY if name == "gpt2-124m" else DEFAULT_FACTORY)


def test_overrides_reach_the_records() -> None:
    config = compose(["schedule=wsd", "schedule.decay_steps=7", "optim.betas=[0.8,0.99]", "model.num_kv_heads=2"])
    assert config.schedule.decay_steps == 7  # type: ignore[attr-defined]
    assert config.optim.betas == (0.8, 0.99)
    assert config.model.num_kv_heads == 2


def test_choosing_another_option_leaves_no_key_of_the_default() -> None:
    assert set(config_to_dict(compose(["schedule=constant"]).schedule)) == {"name", "warmup_steps", "total_steps"}


def test_a_factory_of_your_own_takes_free_keys() -> None:
    config = compose(["model.factory=mine.nets:build", "model.args.depth=3", "model.args.names=[a,b]"])
    assert config.model.args == {"depth": 3, "names": ["a", "b"]}


def test_an_optimizer_of_torch_takes_options_and_groups() -> None:
    config = compose(
        [
            "optim=torch",
            "optim.factory=torch.optim:NAdam",
            "optim.options={betas: [0.8, 0.99]}",
            "optim.options.momentum_decay=0.1",
            "optim.groups={'*.bias': {lr_factor: 2.0, eps: 1e-6}}",
        ]
    )
    record = config.optim.optimizer
    assert record == TorchOptimizer(
        "torch.optim:NAdam",
        betas=(0.8, 0.99),
        momentum_decay=0.1,
        groups={"*.bias": {"lr_factor": 2.0, "eps": 1e-6}},
    )
    assert record.with_changes("*.bias").options == {"betas": (0.8, 0.99), "momentum_decay": 0.1, "eps": 1e-6}
    assert config.optim.max_grad_norm == 1.0


def test_interpolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_LR", "0.0125")
    overrides = ["optim.lr=${oc.env:MY_LR}", "train.global_batch_size=${train.micro_batch_size}"]
    config = compose(overrides)
    assert config.optim.lr == 0.0125
    assert config.train.global_batch_size == config.train.micro_batch_size == 8


def test_yaml_of_a_run_reads_back_as_the_same_values() -> None:
    config = compose(["optim.eps=1e-12", "tracker=wandb", "tracker.tags=['ä',b]", "launch.timeout_s=1e6"])
    text = to_yaml(config_to_dict(config))
    assert yaml.safe_load(text) == config_to_dict(config) == json.loads(json.dumps(config_to_dict(config)))
    assert list(yaml.safe_load(text)) == [item.name for item in dataclasses.fields(RunConfig)]


def test_hash_follows_what_ranks_must_agree_on_and_nothing_else() -> None:
    base = config_hash(compose())
    same = [
        "run_dir=/a",
        "resume=none",
        "report=false",
        "tracker=tensorboard",
        "launch.device=cpu",
        "supervise.limit_s=5",
    ]
    assert {override.partition("=")[0].partition(".")[0] for override in same} == set(HASH_EXCLUDES)
    assert config_hash(compose(same)) == base
    for override in ("seed=1", "optim.lr=2e-3", "engine.zero_stage=1", "train.eval_every=7", "precision=fp32"):
        assert config_hash(compose([override])) != base


def test_the_number_of_ranks_decides_which_batches_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert compose().train.global_batch_size == 16


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_experiments_run_on_up_to_eight_ranks(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    for experiment in ("smoke", "reproducible"):
        assert compose([f"experiment={experiment}"]).train.global_batch_size % world_size == 0


def test_conf_ships_inside_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] == {"conf": "dtrain/conf"}
    assert config_folder() == ROOT / "conf"


@pytest.mark.processes
def test_an_installed_package_reads_its_own_conf(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "dtrain", tmp_path / "dtrain", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "conf", tmp_path / "dtrain/conf")
    with (tmp_path / "dtrain/conf/train.yaml").open("a", encoding="utf-8") as file:
        file.write("seed: 41\n")
    command = [sys.executable, "-m", "dtrain", "train", "--cfg", "job", "-p", "seed"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "41\n")
