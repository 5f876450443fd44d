"""``model=denoiser``: shapes, what it is told, and that it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.errors import ConfigError
from dtrain.parameters.groups import find_units
from dtrain.tasks import Denoising
from dtrain.tasks.denoising import add_noise, signal_shares
from tests.helpers.image_models import build, classification, start

TASK = Denoising(("zero", "one"), (1, 8, 12), num_times=50)


def network(task: Any = TASK, **keys: Any) -> Any:
    return build("images.denoiser", task, **{"num_layers": 1, "hidden_dim": 16} | keys)


def noisy_batch(size: int = 16) -> dict[str, Tensor]:
    """Bright images of class one and dark ones of class zero, at all times."""
    generator = torch.Generator().manual_seed(0)
    classes, times = torch.arange(size) % 2, torch.linspace(0, TASK.num_times - 1, size).long()
    images = (2.0 * classes - 1).view(-1, 1, 1, 1).expand(-1, *TASK.input_shape)
    noise = torch.randn(images.shape, generator=generator)
    noisy, velocity = add_noise(images, noise, signal_shares(TASK.num_times)[times])
    return {"noisy": noisy, "times": times, "classes": classes, "targets": velocity}


def test_its_shapes_and_that_gradients_reach_every_parameter() -> None:
    model, inputs = network(), noisy_batch()
    places = (*(f"down.{i}" for i in range(4)), *(f"up.{i}" for i in range(4)), *(f"middle.{i}" for i in range(2)))
    assert find_units(model, "auto") == [f"model.{place}" for place in places]
    assert not model(**inputs).prediction.any(), "it begins with no velocity"
    for parameter in model.parameters():  # those that begin at zero hide others
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    output = model(**inputs)
    assert output.prediction.shape == inputs["noisy"].shape
    output.loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    for told in ("times", "classes"):
        other = inputs | {told: inputs[told].flip(0)}
        assert not torch.allclose(model(**other).prediction, output.prediction, rtol=1e-2), told


def test_it_learns() -> None:
    engine = start(network(), optimizer=dtrain.AdamW(lr=3e-3))
    inputs, losses = noisy_batch(), []
    for _ in range(30):
        loss = engine(**inputs).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    assert losses[-1] < 0.5 * losses[0]


def test_what_it_cannot_take_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^model=denoiser is for denoising, but the task of the data is class"):
        network(classification(1, 8, 8))
    with pytest.raises(ConfigError, match=r"^model=denoiser takes images whose sides divide by 4, .* 8 x 10; resize"):
        network(Denoising(("zero",), (1, 8, 10)))
    with pytest.raises(ConfigError, match=r"^model\.hidden_dim=12 does not divide by 8"):
        network(hidden_dim=12)
