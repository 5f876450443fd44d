"""Whole runs on images and numbers: each experiment learns, writes its files, and continues with equal bits."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from dtrain.cli.resolve import compose
from dtrain.errors import DtrainError
from dtrain.train.run import run_training
from tests.engines.helpers import fingerprints
from tests.helpers.launch import curve, summary
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

_QUICK = (
    "schedule=constant",  # the rate does not depend on train.steps
    *("precision=fp32", "optim.compile=false", "optim.lr=1e-2", "checkpoint.asynchronous=false"),
    *("train.micro_batch_size=16", "train.global_batch_size=32", "train.eval_every=0", "train.save_every=0"),
    *("train.log_every=1", "launch.device=cpu", "launch.threads_per_rank=1"),
)
_DIGITS = ("data.characters=digits", "data.size=12")
_GROWTH = "train.global_batch_size={0:32,22:16}"
_VIT = "model.args={hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}"


# overrides of an experiment of conf/, what its last validation must reach, and what sample.txt begins with
EXPERIMENTS: dict[str, tuple[tuple[str, ...], str, float, str]] = {
    "glyphs": (
        (*_DIGITS, "model.hidden_dim=8", "train.steps=24", "train.eval_every=12", _GROWTH),
        "val_accuracy",
        0.2,  # a tenth by chance, with a standard deviation of 0.024
        "of 160 validation samples right",
    ),
    # about 0.3 here
    "vit": ((*_DIGITS, "train.steps=60", "seed=2", _VIT), "val_accuracy", 0.2, "of 160 validation samples right"),
    "regression": (
        ("data.samples=1000", "model.hidden_dim=32", "train.steps=40"),
        "val_r2",
        0.5,  # 0 for the mean of the targets
        "of 44 validation samples are off by less than",
    ),
    "diffusion": (
        ("data.size=12", "model.hidden_dim=8", "train.steps=20", "ema.decay=0.8"),
        "val_loss",
        0.0,
        "60 images drawn from noise, of the classes 0, 1, 2",
    ),
}


def _run(rank: int, world: int, run_dir: str, *overrides: str) -> int:
    os.dup2(os.open(f"{run_dir}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    return run_training(compose([*_QUICK, f"run_dir={run_dir}", *overrides]))


def _train(run_dir: Path, *overrides: str, world: int = 1) -> str:
    """Trains on ``world`` ranks; returns the log."""
    assert run_ranks(world, _run, str(run_dir), *overrides) == [0] * world
    return Path(f"{run_dir}.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in ("vit", "diffusion") else [])
        for name in EXPERIMENTS
    ],
)
def test_an_experiment_learns_and_writes_its_files(tmp_path: Path, name: str) -> None:
    overrides, metric, least, sample = EXPERIMENTS[name]
    run_dir = tmp_path / "run"
    log = _train(run_dir, f"experiment={name}", "report=false", *overrides)
    last = curve(run_dir)[-1]
    assert last[metric] > least
    if name == "diffusion":
        assert max(last["val_loss"], last["val_loss_ema"]) < 0.8  # 1 for no velocity at all
    metrics = {key: value for key, value in last.items() if key != "step" and not key.startswith("val_loss")}
    assert summary(run_dir)["val_metrics"] == metrics
    assert sample in (run_dir / "sample.txt").read_text(encoding="utf-8").splitlines()[0]
    with Image.open(run_dir / "sample.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert len(np.unique(np.asarray(picture))) > 20
    assert " samples/s  " in log
    assert " tok/s" not in log
    assert not [line for line in curve(run_dir) if "seq_len" in line]
    assert ("from step 22: 16 samples in a step" in log) == (name == "glyphs")


def _write_photos(folder: Path) -> str:
    """Writes noisy images of three classes that differ in their color; returns the override to use them."""
    rng = np.random.default_rng(0)
    for channel, label in enumerate(("blue", "green", "red")):
        (folder / label).mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(0, 120, (14, 18, 3), dtype=np.uint8)
            pixels[..., 2 - channel] += 100
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return f"data.path={folder}"


_PHOTOS = (
    # on a CPU without AVX-512, torch 2.13 crashes in the backward of a convolution of 4 channels
    *("model=convnet", "model.num_layers=1", "model.hidden_dim=8"),
    *("data=images", "data.size=8", "data.augment=crop_flip", "data.validation_percent=20", "data.workers=1"),
    *("train.micro_batch_size=4", "train.global_batch_size=8", "train.eval_every=3", "report=false"),
    "train.steps=5",  # of 29 images or so: more than an epoch
)
_NOISE = (
    *("model=denoiser", "model.hidden_dim=8", "data=glyphs", "data.task=denoising", _DIGITS[0], "data.size=8"),
    *("train.micro_batch_size=2", "train.global_batch_size=4", "train.steps=3", "train.eval_batches=2"),
    *("train.eval_every=2", "train.sample_tokens=0", "report=false", "engine.reproducible=true"),
)


def _outcomes(rank: int, world: int, folder: str, cases: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, str]]:
    """Trains each case in a folder of its name; returns the kinds and messages of the errors."""
    found = {}
    for name, overrides in cases.items():
        try:
            _run(rank, world, f"{folder}/{name}", *overrides)
            found[name] = "", ""
        except DtrainError as error:
            found[name] = type(error).__name__, str(error)
    return found


def test_a_resumed_run_has_the_bits_of_the_whole_one(tmp_path: Path) -> None:
    """Among them running statistics, and how images are changed at random. Other classes are refused."""
    photos = (*_PHOTOS, _write_photos(tmp_path / "photos"))
    _train(tmp_path / "whole", *photos)
    for steps in (3, 5):
        _train(tmp_path / "parts", *photos, f"train.steps={steps}")
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    whole = fingerprints(tmp_path / "whole")
    assert any("model.stem_norm.running_mean" in name for name in whole)
    assert fingerprints(tmp_path / "parts") == whole

    # also if the head, which is padded, has a row for each of the classes
    os.rename(tmp_path / "photos" / "red", tmp_path / "photos" / "violet")
    cases = {"parts": (*photos, "train.steps=6")}
    name, message = run_ranks(1, _outcomes, str(tmp_path), cases)[0]["parts"]
    assert name == "ConfigError"
    assert "was trained on other data: class 2 'red' (now 'violet'); set the data back, or choose" in message
    assert summary(tmp_path / "parts")["steps"] == 5


def test_noise_has_the_same_bits_on_two_ranks_and_resumed(tmp_path: Path) -> None:
    _train(tmp_path / "one", *_NOISE)
    _train(tmp_path / "parts", *_NOISE, "train.steps=2", world=2)
    _train(tmp_path / "parts", *_NOISE)
    assert curve(tmp_path / "parts") == curve(tmp_path / "one")
    assert fingerprints(tmp_path / "parts") == fingerprints(tmp_path / "one")


def test_models_and_data_of_a_user(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(60, 2, 6, 5, generator=generator), torch.randint(3, (60,), generator=generator)
    save_file({"x": x, "y": y}, tmp_path / "train.safetensors")
    short = ("train.steps=2", "train.micro_batch_size=4", "train.global_batch_size=8", "train.eval_batches=1")
    short += ("report=false",)
    arrays = ("data=arrays", f"data.path={tmp_path}/train.safetensors", *short)
    own = "model.factory=tests.helpers.image_models:"
    statistics = ("experiment=glyphs", *_DIGITS, "model.hidden_dim=8", "engine.reproducible=true", *short)
    pair = "Pair returned a tuple; for classification a model returns a tensor, or an object"
    fixed = "reproducible=True cannot hold with 'model.stem_norm' (BatchNorm2d): its running statistics"
    cases = {
        "glyphs": ((f"{own}plain", "data=glyphs", *_DIGITS[:2], *short), "", ""),
        "arrays": ((f"{own}WithLogits", *arrays), "", ""),
        "pair": ((f"{own}Pair", *arrays), "ModelError", pair),
        "none": (("model=mlp", "data=arrays", f"data.path={tmp_path}/none", *short), "ConfigError", "data.path="),
        "no_image": (
            ("model=convnet", "data=friedman", *short),
            "ConfigError",
            "model=convnet takes images of shape [",
        ),
        "statistics": (statistics, "ConfigError", fixed),
    }
    (found,) = run_ranks(1, _outcomes, str(tmp_path), {name: words for name, (words, *_) in cases.items()})
    for name, (_, kind, text) in cases.items():
        assert found[name][0] == kind, name
        assert found[name][1].startswith(text)
        if not kind:
            assert 0 <= summary(tmp_path / name)["val_metrics"]["val_accuracy"] <= 1
        assert kind != "ConfigError" or not (tmp_path / name).exists()
