"""``model=mlp``: shapes, units of sharding, FP8, and that it learns."""

from __future__ import annotations

import pytest
import torch

import dtrain
from dtrain.errors import ConfigError
from dtrain.parameters.groups import find_units
from dtrain.tasks import Regression
from tests.helpers.image_models import batch, build, classification, start, train

SIZES = {"num_layers": 3, "hidden_dim": 32}


def test_its_shapes_and_that_gradients_reach_every_parameter() -> None:
    task = classification(2, 6)
    model = build("mlp", task, **SIZES)
    layers = (12 + 1) * 32 + 2 * (32 * 33 + 64)
    assert sum(p.numel() for p in model.parameters()) == layers + 64 + 33 * 16, "5 classes padded to 16"
    assert find_units(model, "auto") == ["model.blocks.0", "model.blocks.1", "model.blocks.2"]
    output = model(**batch(task))
    assert output.prediction.shape == (8, 5)
    output.loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_dropout_is_in_training_only() -> None:
    task = classification(12)
    model, inputs = build("mlp", task, dropout=0.5, **SIZES), batch(task)
    assert not torch.equal(model(**inputs).prediction, model(**inputs).prediction)
    model.eval()
    assert torch.equal(model(**inputs).prediction, model(**inputs).prediction)


def test_samples_without_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model=mlp takes samples of one number or more; .* \(3, 0\)"):
        build("mlp", classification(3, 0))


def test_fp8_takes_the_layers_between_the_first_and_the_last() -> None:
    task = classification(12)
    engine = start(build("mlp", task, **SIZES), precision="fp8")
    train(engine, task, steps=1)
    assert engine.contract.float8_modules == ("model.blocks.1.linear", "model.blocks.2.linear")


def test_it_fits_a_function_that_no_linear_model_fits() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 2, generator=generator)
    y = (x[:, :1] * x[:, 1:]).float()
    task = Regression((2,), mean=(0.0,), std=(1.0,))
    engine = start(build("mlp", task, **SIZES), optimizer=dtrain.AdamW(lr=1e-2))
    for _ in range(60):
        loss = engine(inputs=x, targets=y).loss
        engine.backward(loss)
        engine.step()
    linear = torch.linalg.lstsq(x, y).solution
    assert loss.item() < 0.1 * float((x @ linear - y).square().mean())
