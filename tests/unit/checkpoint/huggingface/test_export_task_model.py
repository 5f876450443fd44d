"""A run on images or numbers becomes a folder; the model loaded from it predicts what the engine predicts."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import dtrain
from dtrain.checkpoint import export
from dtrain.checkpoint.format.checked_file import DamageError
from dtrain.checkpoint.huggingface import exporter, tensor_mapping
from dtrain.checkpoint.huggingface.task_model import preprocessor_config
from dtrain.cli.resolve import compose
from dtrain.data import Dataset, load_dataset
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.engine.interface import Engine
from dtrain.errors import CheckpointError, ConfigError, DataError
from dtrain.models import build_model
from dtrain.models.images.hf import HFImageModel
from dtrain.models.task_model import TaskModel
from dtrain.tasks import Classification, Denoising, Regression
from dtrain.tasks.denoising import draw, draw_images
from dtrain.tasks.description import describe_task
from dtrain.train.run import run_training
from dtrain.train.setup import make_engine
from tests.helpers.damage import R0, flip

pytestmark = pytest.mark.usefixtures("no_network")

_SMALL = ["train.steps=3", "train.eval_every=0", "train.save_every=0", "train.global_batch_size=8"]
_SMALL += ["train.micro_batch_size=8", "train.eval_batches=1", "train.sample_tokens=0", "report=false"]
_SMALL += ["precision=fp32", "optim.lr=0.01", "ema.decay=0.9", "launch.threads_per_rank=1", "supervise.enabled=false"]
_DIGITS = ["data=glyphs", "data.characters=digits", "data.size=12"]
_RUNS = {
    "convnet": ["model=convnet", "model.hidden_dim=8", "model.num_layers=1", *_DIGITS],
    "mlp": ["model=mlp", "model.hidden_dim=16", "data=friedman", "data.samples=200"],
    "denoiser": ["model=denoiser", "model.hidden_dim=8", "data.task=denoising", *_DIGITS],
    "vit": ["model=vit", "model.args={hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2}", *_DIGITS],
}


def keys(name: str, run_dir: Path, *overrides: str) -> list[str]:
    return [*_SMALL, *_RUNS[name], f"run_dir={run_dir}", *overrides]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Trained runs by name."""
    root = tmp_path_factory.mktemp("runs")
    for name in _RUNS:
        assert run_training(compose(keys(name, root / name))) == 0
    return {name: root / name for name in _RUNS}


def engine_of(name: str, run_dir: Path) -> tuple[Engine, TaskModel, Dataset]:
    """Returns the trained engine, its model and its data."""
    config = compose(keys(name, run_dir))
    dataset = load_dataset(config.data, config.model.max_seq_len)
    model = build_model(config.model, dataset.task, seed=99)
    assert isinstance(model, TaskModel)
    engine = make_engine(config, model, SingleRank(torch.device("cpu")))
    engine.load(run_dir / "checkpoints")
    return engine, model, dataset


def predictions(engine: Engine, batch: dict[str, Tensor], *, ema: bool = False) -> Tensor:
    with engine.ema() if ema else nullcontext(), engine.eval():
        found: Tensor = engine(**batch).prediction.clone()
    return found


def validation(dataset: Dataset) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Returns a batch, and the inputs of the model in it."""
    batch = dataset.validation.batch(np.arange(8))
    return batch, [tensor for name, tensor in batch.items() if name != "targets"]


@pytest.mark.parametrize("name", ["convnet", "mlp", "denoiser", "vit"])
def test_a_loaded_model_predicts_as_before(name: str, runs: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
    engine, _, dataset = engine_of(name, runs[name])
    batch, inputs = validation(dataset)
    monkeypatch.setattr(tensor_mapping, "_BLOCK_ELEMENTS", 997)
    found = {}
    for weights in ("master", "ema"):
        model = dtrain.load_exported(export(runs[name], tmp_path / weights, weights=weights))
        assert model.task == dataset.task
        assert not any(module.training for module in model.modules())
        with monkeypatch.context() as units:
            units.setattr(type(model.task), "in_data_units", lambda task, prediction: prediction)
            found[weights] = model(*inputs)
        assert torch.equal(found[weights], predictions(engine, batch, ema=weights == "ema"))
        assert torch.equal(model(*inputs), dataset.task.in_data_units(found[weights]))
    assert not torch.equal(found["master"], found["ema"])
    rounded = load_file(export(runs[name], tmp_path / "bf16", dtype="bf16") / "model.safetensors")
    exact = load_file(tmp_path / "master" / "model.safetensors")
    for key, value in exact.items():
        is_buffer = "running" in key or "num_batches" in key
        assert torch.equal(rounded[key], value if is_buffer else value.bfloat16()), key
    again = dtrain.load_exported(tmp_path / "bf16")
    assert all(parameter.dtype == torch.float32 for parameter in again.parameters())
    torch.testing.assert_close(again(*inputs), model.task.in_data_units(found["master"]), rtol=0.05, atol=0.05)


def test_transformers_loads_its_models(runs: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForImageClassification

    engine, own, dataset = engine_of("vit", runs["vit"])
    batch, (inputs,) = validation(dataset)
    for weights in ("master", "ema"):
        out = export(runs["vit"], tmp_path / weights, weights=weights)
        theirs = AutoModelForImageClassification.from_pretrained(out, local_files_only=True).eval()
        loaded, exported = theirs.state_dict(), load_file(out / "model.safetensors")
        assert loaded.keys() == exported.keys()
        assert all(torch.equal(loaded[name], value) for name, value in exported.items())
        with torch.no_grad():
            logits = theirs(inputs).logits
        # the weights lie at other addresses, by which a CPU's product takes another order of its sums
        torch.testing.assert_close(logits, predictions(engine, batch, ema=weights == "ema"), rtol=1e-5, atol=1e-5)
        assert isinstance(own.model, HFImageModel)
        assert type(theirs) is type(own.model.hf)
        assert theirs.config.id2label == dict(enumerate("0123456789"))
        assert theirs.config.label2id == {str(digit): digit for digit in range(10)}


def test_only_a_model_of_transformers_has_its_processor(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "preprocessor_config", lambda task: {"do_resize": True})  # as if in colors
    for name in ("vit", "convnet"):
        out = export(runs[name], tmp_path / name)
        assert (out / "preprocessor_config.json").is_file() == (name == "vit")


def test_predictions_and_rows_are_in_the_unit_of_the_data(runs: dict[str, Path], tmp_path: Path) -> None:
    engine, _, dataset = engine_of("mlp", runs["mlp"])
    model, task = dtrain.load_exported(export(runs["mlp"], tmp_path / "out")), dataset.task
    assert isinstance(task, Regression)
    batch, (inputs,) = validation(dataset)
    rows: Any = dataset.validation
    raw = rows.table.x[rows.rows[:8]]
    assert torch.equal(dtrain.standardize(raw, model.task), inputs)
    expected = predictions(engine, batch).double() * task.std[0] + task.mean[0]
    assert torch.equal(model(inputs), expected)
    assert 5 < float(expected.mean()) < 25  # those of the function are about 14
    with pytest.raises(ConfigError, match=r"the inputs have shape \[10\], but one sample of the data \[10\]"):
        dtrain.standardize(raw[0], model.task)


@pytest.mark.parametrize(("channels", "task"), [("rgb", "classification"), ("gray", "denoising")])
def test_an_image_file_is_read_as_those_of_validation(channels: str, task: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for number in range(3):
            pixels = rng.integers(0, 256, (40, 23 + number, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / label / f"{number}.png")
    model = "convnet" if task == "classification" else "denoiser"
    settings = [f"data.path={tmp_path}", f"data.channels={channels}", f"data.task={task}", "data.size=8"]
    config = compose(["data=images", *settings, "data.workers=0", f"model={model}"])
    dataset = load_dataset(config.data, 0)
    source: Any = dataset.validation
    for sample, name in enumerate(source.pictures.names):
        image = dtrain.read_image(tmp_path / name, dataset.task)
        batch = source.batch(np.array([sample]))
        if isinstance(dataset.task, Classification):
            assert torch.equal(image, batch["inputs"][0])
        else:
            pixels = torch.from_numpy(source.pictures.read(np.array([sample]))[0][0])
            assert torch.equal(image, pixels * 2 - 1)
    with pytest.raises(DataError, match=r"none\.png cannot be decoded: .*No such file"):
        dtrain.read_image(tmp_path / "none.png", dataset.task)
    with pytest.raises(ConfigError, match=r"read_image prepares square images, but .* numbers of shape \[2\]"):
        dtrain.read_image(tmp_path / name, Regression((2,), (0.0,), (1.0,)))
    with pytest.raises(ConfigError, match=r"standardize prepares rows of numbers, .* read_image prepares images"):
        dtrain.standardize(image, dataset.task)


def test_the_processor_of_transformers_prepares_nearly_the_same_pixels(tmp_path: Path) -> None:
    from transformers import AutoImageProcessor

    task = Classification(("a", "b"), (3, 16, 16), 0.0, (0.5, 0.4, 0.3), (0.5, 0.2, 0.1), is_image=True)
    config = preprocessor_config(describe_task(task) or {})
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    processor = AutoImageProcessor.from_pretrained(tmp_path, local_files_only=True)
    x, y = np.meshgrid(np.linspace(0, 255, 200), np.linspace(0, 255, 130))
    pixels = np.stack((x, y, 255 - (x + y) / 2), axis=2).astype(np.uint8)
    std = torch.tensor(task.input_std)[:, None, None]
    for size, levels in (((64, 32), 0), ((130, 200), 2)):
        Image.fromarray(pixels[: size[0], : size[1]]).save(tmp_path / "image.png")
        theirs = processor(Image.open(tmp_path / "image.png"), return_tensors="pt")["pixel_values"][0]
        ours = dtrain.read_image(tmp_path / "image.png", task)
        assert float(((ours - theirs) * std * 255).abs().max()) < levels + 0.01
    gray = Classification(("a", "b"), (1, 16, 16), 0.0, (0.5,), (0.5,), is_image=True)
    assert preprocessor_config(describe_task(gray) or {}) is None


def test_a_loaded_denoiser_draws_the_images_of_the_run(runs: dict[str, Path], tmp_path: Path) -> None:
    engine, _, dataset = engine_of("denoiser", runs["denoiser"])
    assert isinstance(dataset.task, Denoising)
    model = dtrain.load_exported(export(runs["denoiser"], tmp_path / "out", weights="ema"))
    assert isinstance(model.task, Denoising)
    classes = torch.arange(4)
    drawn = draw_images(model, model.task, classes, torch.Generator().manual_seed(1), num_steps=3)
    assert torch.equal(drawn, draw(engine, dataset.task, classes, torch.Generator().manual_seed(1), num_steps=3))
    assert drawn.std() > 0.1


def model(**values: Any) -> Any:
    return lambda config: config["model"].update(values)


def task(**values: Any) -> Any:
    return lambda config: config["task"].update(values)


CHANGED = [
    (model(hidden_dim=10**12), r"model\.hidden_dim=1000000000000 is more than the tensors"),
    (model(num_layers=2), r"'blocks\.1\.conv1\.weight' is \[16, 8, 3, 3\], but .* \[8, 8"),
    (model(hidden_dim=True), r"model\.hidden_dim=true is not a whole number"),
    (model(factory="os:system"), "'os:system' is not one of dtrain's"),
    (lambda config: config.update(model=[]), "model.factory=None is not one of dtrain's"),
    (lambda config: config.update(code="x"), "has the unknown key 'code'"),
    (lambda config: config.pop("task"), "lacks 'task'; give a folder that dtrain checkpoint export wrote"),
    (task(name=["language"]), r"task: name is \['language'\], expected one of class"),
    (task(labels=["a"] * 20), r"'head\.\w+' is \[16.*\], but .* \[32"),
    (task(input_shape=[1, 10**9, 10**9]), r"input_shape is \[1, .*, expected a list of sizes"),
    (task(input_shape=[1, 2, 2]), r"images of at least 4 x 4 pixels"),
    (task(input_std=[0]), r"input_std is \[0\], expected a list of numbers above 0"),
    (task(input_mean=[0.5, 0.5]), "input_mean has 2 values and input_std 1; expected 1 of both"),
    (task(input_mean=[], input_std=[]), r"images of shape \[1, 12, 12\] with 0 means"),
]


def test_a_changed_config_is_refused_in_one_line(runs: dict[str, Path], tmp_path: Path) -> None:
    out = export(runs["convnet"], tmp_path / "out")
    exported = (out / "config.json").read_text()
    for change, message in CHANGED:
        change(config := json.loads(exported))
        (out / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=message) as caught:
            dtrain.load_exported(out)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600


def test_a_damaged_folder_or_checkpoint_is_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    out = export(runs["vit"], tmp_path / "vit")
    config = json.loads((out / "config.json").read_text())
    for change in ({"hidden_size": 1 << 40}, {"num_hidden_layers": 1}):
        (out / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(CheckpointError, match=re.escape(str(out))):
            dtrain.load_exported(out)
    (out / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "dtrain"}))
    with pytest.raises(CheckpointError, match=r"has no 'dtrain\.task', .* load it with transformers"):
        dtrain.load_exported(out)
    out = export(runs["mlp"], tmp_path / "mlp")
    weights = out / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        dtrain.load_exported(out)
    with pytest.raises(ConfigError, match="has no adapters to merge"):
        export(runs["mlp"], tmp_path / "merged", merge=True)
    run = shutil.copytree(runs["mlp"], tmp_path / "run")
    flip(R0, 1)(run / "checkpoints" / "step-00000003")
    with pytest.raises(DamageError):
        export(run, tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_a_resume_on_data_of_another_task_is_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    for override, message in (
        ("data.size=16", r"input_shape=\[1, 12, 12\] \(now \[1, 16, 16\]\); set the data back"),
        ("data.characters=all", r"10 classes \(now 62\)"),
    ):
        words = [*keys("convnet", tmp_path / "run", override, f"resume={runs['convnet']}"), "train.steps=4"]
        with pytest.raises(ConfigError, match=r"^the checkpoint at step 3 was trained on other data: " + message):
            run_training(compose(words))
