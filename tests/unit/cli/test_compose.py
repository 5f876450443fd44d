from __future__ import annotations

import json
import tomllib
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtrain.cli.checks import check_config
from dtrain.cli.compose import config_folder
from dtrain.cli.resolve import compose
from dtrain.config import schema
from dtrain.config.dump import HASH_EXCLUDES, config_hash, config_to_dict, to_yaml
from dtrain.config.engines import Native
from dtrain.config.model import DEFAULT_FACTORY, GPT2_FACTORY
from dtrain.config.optim import OptimConfig, TorchOptimizer
from dtrain.config.precision import PrecisionConfig
from dtrain.config.schema import GROUP_OPTIONS, LaunchConfig, RunConfig, TrainConfig, WandbConfig
from tests.unit.cli.regenerate_golden import EXPERIMENTS, experiments

ROOT = Path(__file__).parents[3]
CHOICES = (
    "data=text data.files=*.txt model=tiny optim=adam precision=fp32 schedule=constant engine=ddp tracker=none",
    "data=tokens data.path=a model=gpt-11m optim=adamw-bf16 precision=bf16 schedule=linear engine=native tracker=wandb",
    "data=chat data.files=a data.tokenizer=b model=gpt2-124m optim=adamw precision=fp16 schedule=cosine engine=fsdp2",
    "data=images data.path=a model=convnet optim=lion precision=tf32 schedule=wsd schedule.decay_steps=10",
    "data=glyphs model=vit optim=muon precision=auto tracker=tensorboard checkpoint=default launch=default",
    "data=glyphs data.task=denoising model=denoiser optim=sgd engine=deepspeed",
    "data=arrays data.path=a.safetensors model=mlp optim=torch",
    "data=friedman model=mlp precision=fp8",
    "data=stdlib model=hf model.path=a",
    "model=llama-1b",
    "model=llama-3b",
    "model=llama-8b",
)
SHAPES = {  # as published: layers, width, heads, key and value heads, inner width, length, rope theta; tied embeddings
    "gpt2-124m": ((12, 768, 12, None, None, 1024, 10000.0), True),
    "llama-1b": ((16, 2048, 32, 8, 8192, 2048, 500000.0), True),
    "llama-3b": ((28, 3072, 24, 8, 8192, 4096, 500000.0), True),
    "llama-8b": ((32, 4096, 32, 8, 14336, 8192, 500000.0), False),
}


@pytest.mark.parametrize("overrides", CHOICES)
def test_options_compose(overrides: str) -> None:
    config = compose(overrides.split())
    for word in overrides.split():
        group, option = word.split("=")
        if group in GROUP_OPTIONS:
            assert type(getattr(config, group)) is GROUP_OPTIONS[group][option]
        if group in GROUP_OPTIONS or group in ("model", "precision"):
            assert getattr(config, group).name == option
    if (model := config.model).name in SHAPES:
        keys = ("num_layers", "hidden_dim", "num_heads", "num_kv_heads", "ffn_dim", "max_seq_len", "rope_theta")
        assert (tuple(getattr(model, key) for key in keys), model.tie_embeddings) == SHAPES[model.name]
        assert model.factory == (GPT2_FACTORY if model.name == "gpt2-124m" else DEFAULT_FACTORY)


def test_every_option_is_composed_and_is_yaml_and_schema() -> None:
    options = {f"{path.parent.name}={path.stem}" for path in config_folder().glob("*/*.yaml")}
    named = {option for option in options if not option.startswith(("experiment=", "debug="))}
    assert named <= {word for overrides in CHOICES for word in overrides.split()}
    for group, records in GROUP_OPTIONS.items():
        of_group = {option for option in options if option.startswith(f"{group}=")}
        assert of_group == {f"{group}={name}" for name in records}


def test_golden_experiments() -> None:
    stored = EXPERIMENTS.read_text(encoding="utf-8")
    assert experiments() == stored, "run `python -m tests.unit.cli.regenerate_golden` if this is on purpose"


def test_default_is_the_schema_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")  # decides which batches divide
    config = compose()
    assert config == RunConfig()
    assert isinstance(config.optim.betas, tuple)
    with pytest.raises(FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


def test_experiments_that_say_so_run_on_up_to_eight_ranks() -> None:
    changed = yaml.safe_load(EXPERIMENTS.read_text(encoding="utf-8"))
    for experiment in ("smoke", "reproducible"):
        keys = {"micro_batch_size", "global_batch_size"}
        sizes = {key: changed[f"experiment={experiment}"].get(f"train.{key}") for key in keys}
        train = TrainConfig(**{key: size for key, size in sizes.items() if size is not None})
        for world_size in (1, 2, 4, 8):
            check_config(RunConfig(train=train), world_size)


def test_values_and_interpolations_reach_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_LR", "0.0125")
    values = ["schedule.decay_steps=7", "optim.betas=[0.8,0.99]", "model.num_kv_heads=2"]
    interpolated = ["optim.lr=${oc.env:MY_LR}", "train.global_batch_size=${train.micro_batch_size}"]
    config = compose(["schedule=wsd", *values, *interpolated])
    assert config.schedule.decay_steps == 7  # type: ignore[attr-defined]
    assert (config.optim.betas, config.optim.lr, config.model.num_kv_heads) == ((0.8, 0.99), 0.0125, 2)
    assert config.train.global_batch_size == config.train.micro_batch_size == 8


def test_free_keys_of_factories_and_no_key_of_an_option_that_is_not_chosen() -> None:
    words = "schedule=constant model.factory=mine.nets:build model.args.depth=3 model.args.names=[a,b] optim=torch "
    words += "optim.factory=torch.optim:NAdam optim.options={betas:[0.8,0.99]} optim.options.momentum_decay=0.1"
    config = compose([*words.split(), "optim.groups={'*.bias': {lr_factor: 2.0, eps: 1e-6}}"])
    assert set(config_to_dict(config.schedule)) == {"name", "warmup_steps", "total_steps"}
    assert config.model.args == {"depth": 3, "names": ["a", "b"]}
    record, groups = config.optim.optimizer, {"*.bias": {"lr_factor": 2.0, "eps": 1e-6}}
    assert record == TorchOptimizer("torch.optim:NAdam", betas=(0.8, 0.99), momentum_decay=0.1, groups=groups)
    assert record.with_changes("*.bias").options == {"betas": (0.8, 0.99), "momentum_decay": 0.1, "eps": 1e-6}
    assert config.optim.max_grad_norm == 1.0


def test_yaml_of_a_run_reads_back_as_the_same_values() -> None:
    config = RunConfig(tracker=WandbConfig(tags=["ä", "b"]), launch=LaunchConfig(timeout_s=1e6))
    values = config_to_dict(replace(config, optim=replace(config.optim, eps=1e-12)))
    text = to_yaml(values)
    assert yaml.safe_load(text) == values == json.loads(json.dumps(values))
    assert list(yaml.safe_load(text)) == [item.name for item in fields(RunConfig)]


def test_hash_follows_what_ranks_must_agree_on_and_nothing_else() -> None:
    base = config_hash(RunConfig())
    same: dict[str, Any] = {"run_dir": "/a", "resume": "none", "report": False, "tracker": schema.TensorboardConfig()}
    same |= {"launch": LaunchConfig(device="cpu"), "supervise": schema.SuperviseConfig(limit_s=5)}
    assert same.keys() == set(HASH_EXCLUDES)
    assert config_hash(RunConfig(**same)) == base
    others = [RunConfig(seed=1), RunConfig(optim=OptimConfig(lr=2e-3)), RunConfig(engine=Native(zero_stage=1))]
    others += [RunConfig(train=TrainConfig(eval_every=7)), RunConfig(precision=PrecisionConfig("fp32"))]
    assert len({base, *map(config_hash, others)}) == 1 + len(others)


def test_conf_ships_inside_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] == {"conf": "dtrain/conf"}
    assert config_folder() == ROOT / "conf"
