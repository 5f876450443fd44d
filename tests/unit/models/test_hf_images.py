from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.config.model import HF_IMAGES_FACTORY, ModelConfig
from dtrain.errors import ConfigError
from dtrain.models import check_model
from dtrain.models.task_model import TaskModel
from dtrain.parameters.groups import find_units
from dtrain.tasks import Regression
from tests.helpers.image_models import batch, build, classification, start, train
from tests.unit.models.test_hf import edit, to_pickle

TASK = classification(3, 16, 16)
WIDTHS = {"hidden_size": 32, "intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "vit": {**WIDTHS, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4},
    "convnext": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 2},
}


def save(folder: Path, family: str, classes: int = 5) -> Path:
    """Writes a model for ``TASK`` with weights so large that the classes differ, whose files say BF16."""
    import transformers

    config = transformers.AutoConfig.for_model(family, **FAMILIES[family], num_labels=classes, image_size=16)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    return folder


def network(task: Any = TASK, **keys: Any) -> TaskModel:
    return build("images.hf", task, **keys)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_fp32_engine_computes_the_bits_of_transformers(family: str, tmp_path: Path) -> None:
    import transformers

    theirs = transformers.AutoModelForImageClassification.from_pretrained(
        save(tmp_path, family), dtype=torch.float32, local_files_only=True
    ).eval()
    model = network(path=str(tmp_path), channels_last=False)
    engine = start(model)
    inputs = batch(TASK)
    with engine.eval():
        got = engine(**inputs).prediction
    with torch.no_grad():
        assert torch.equal(got, theirs(inputs["inputs"]).logits)
    assert len(find_units(model, "auto")) >= 2
    assert all(loss > 0 for loss in train(engine, TASK, steps=2))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_built_for_the_data(family: str) -> None:
    task = classification(1, 20, 20, classes=7)
    model = network(task, args={"model_type": family, **FAMILIES[family]})
    assert model(**batch(task)).prediction.shape == (8, 7)
    assert model.model.hf.config.id2label[6] == "class 6"
    assert model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    numbers = network(Regression((1, 8, 12), mean=(0.0,), std=(1.0,)), args={"hidden_size": 64})
    assert numbers.model.hf.config.image_size == [8, 12]
    with torch.device("meta"):
        of_pairs = network(classification(3, 64, 64), args={"model_type": "hiera"})
    assert of_pairs.model.hf.config.image_size == [64, 64], "a family whose size is a pair"


def test_a_head_for_other_classes_is_new(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dtrain")
    path = str(save(tmp_path, "vit"))
    kept = network(path=path).model.hf
    assert "calls its classes 'LABEL_0', ..., the data 'class 0'" in caplog.text
    caplog.clear()
    task = classification(3, 16, 16, classes=9)
    new = network(task, path=path)
    assert "drawn at random: classifier.bias, classifier.weight" in caplog.text
    assert new(**batch(task)).prediction.shape == (8, 9)
    for name, parameter in kept.vit.named_parameters():
        assert torch.equal(new.model.hf.vit.get_parameter(name), parameter)
    assert new.model.hf.classifier.weight.std() < 0.5 * kept.classifier.weight.std()
    caplog.clear()
    random = network(classification(1, 8, 8), path=path, weights="random")
    assert random(**batch(classification(1, 8, 8))).prediction.shape == (8, 5)
    assert "head" not in caplog.text


@pytest.mark.parametrize(
    ("damage", "keys", "message"),
    [
        (to_pickle, {}, r"has neither model\.safetensors nor .*; pytorch_model\.bin is not read because"),
        (edit(num_hidden_layers=3), {}, r"its weights lack 'vit\.layers\.2\..*ViTForImageClassification; give"),
        (edit(model_type="llama"), {"weights": "random"}, "has no image classifier of model_type llama"),
        (edit(model_type="timm_wrapper"), {"weights": "random"}, "timm_wrapper is a model of timm, which may"),
        (
            None,
            {"path": None, "args": {"model_type": "hiera"}, "task": classification(3, 17, 17)},
            r"does not take the images of the data, 17 x 17 .*or entries of config\.json in model\.args that fit them$",
        ),
        (None, {"task": classification(3, 20, 20)}, r"does not take the images of the data, 20 x 20 with 3 channels: "),
        (None, {"task": classification(3, 48)}, r"^model=hf takes images of shape .* \[3, 48\]; choose model=mlp"),
        (None, {"weights": "random", "args": {"model_type": "swin"}}, r"model_type=swin differs from 'vit'"),
        (None, {"path": None, "args": {"hidden_size": "wide"}}, r"^model=hf model\.args: config\.json is not valid: "),
    ],
)
def test_a_mistake_is_one_line(damage: Any, keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(tmp_path, "vit")
    if damage is not None:
        damage(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        network(**{"path": str(tmp_path)} | keys)
    assert "\n" not in str(caught.value)


def test_a_folder_is_checked_before_there_are_data(tmp_path: Path) -> None:
    config = ModelConfig(name="vit", factory=HF_IMAGES_FACTORY, path=str(save(tmp_path, "vit")))
    check_model(config)
    to_pickle(tmp_path)
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is not read"):
        check_model(config)
