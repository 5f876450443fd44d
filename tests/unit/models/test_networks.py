from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.errors import ConfigError
from dtrain.models.task_model import TaskModel
from dtrain.parameters.groups import find_units
from dtrain.tasks import Denoising, Regression
from dtrain.tasks.denoising import add_noise, signal_shares
from tests.helpers.image_models import batch, build, classification, start

TASK = classification(3, 12, 10)
NOISY = Denoising(("zero", "one"), (1, 8, 12), num_times=50)
MLP = {"num_layers": 3, "hidden_dim": 32}
IMAGES = {"num_layers": 1, "hidden_dim": 16}


def convnet(**keys: Any) -> TaskModel:
    return build("images.convnet", TASK, **IMAGES | keys)


def denoiser(task: Any = NOISY, **keys: Any) -> Any:
    return build("images.denoiser", task, **IMAGES | keys)


def noisy_batch(size: int = 16) -> dict[str, Tensor]:
    """Bright images of class one and dark ones of class zero, at all times."""
    generator = torch.Generator().manual_seed(0)
    classes, times = torch.arange(size) % 2, torch.linspace(0, NOISY.num_times - 1, size).long()
    images = (2.0 * classes - 1).view(-1, 1, 1, 1).expand(-1, *NOISY.input_shape)
    noise = torch.randn(images.shape, generator=generator)
    noisy, velocity = add_noise(images, noise, signal_shares(NOISY.num_times)[times])
    return {"noisy": noisy, "times": times, "classes": classes, "targets": velocity}


CONVOLUTIONS = 9 * (3 * 16 + 2 * 16 * 16 + 16 * 32 + 32 * 32 + 32 * 64 + 64 * 64) + 16 * 32 + 32 * 64
NORMS = 2 * (3 * 16 + 3 * 32 + 3 * 64)


@pytest.mark.parametrize(
    ("factory", "task", "sizes", "num_parameters"),  # 5 classes are padded to 16
    [
        ("mlp", classification(2, 6), MLP, (12 + 1) * 32 + 2 * (32 * 33 + 64) + 64 + 33 * 16),
        ("images.convnet", TASK, IMAGES, CONVOLUTIONS + NORMS + 64 * 16 + 16),
    ],
)
def test_shapes_and_that_gradients_reach_every_parameter(
    factory: str, task: Any, sizes: dict[str, int], num_parameters: int
) -> None:
    model = build(factory, task, **sizes)
    assert sum(p.numel() for p in model.parameters()) == num_parameters
    assert find_units(model, "auto") == ["model.blocks.0", "model.blocks.1", "model.blocks.2"]
    output = model(**batch(task))
    assert output.prediction.shape == (8, 5)
    output.loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("factory", "task", "keys", "message"),
    [
        ("mlp", classification(3, 0), MLP, r"model=mlp takes samples of one number or more; .* \(3, 0\)"),
        ("images.convnet", classification(7), {}, r"^model=convnet takes images .*choose model=mlp"),
        ("images.convnet", classification(3, 3, 32), {}, r"^model=convnet takes images .*3 x 32; resize"),
        ("images.convnet", classification(1, 3, 8, 8), {}, r"^model=convnet takes images .*choose model=mlp"),
        ("images.denoiser", classification(1, 8, 8), IMAGES, r"is for denoising, but the task of the data is class"),
        ("images.denoiser", Denoising(("zero",), (1, 8, 10)), IMAGES, r"whose sides divide by 4, .* 8 x 10; resize"),
        ("images.denoiser", NOISY, {"num_layers": 1, "hidden_dim": 12}, r"^model\.hidden_dim=12 does not divide by 8"),
    ],
)
def test_what_a_network_cannot_take_is_refused(factory: str, task: Any, keys: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(factory, task, **keys)


def products() -> dict[str, Tensor]:
    """Targets that no linear model fits."""
    x = torch.randn(256, 2, generator=torch.Generator().manual_seed(0))
    return {"inputs": x, "targets": x[:, :1] * x[:, 1:]}


def brightness() -> dict[str, Tensor]:
    images = torch.randn(16, 1, 8, 12, generator=torch.Generator().manual_seed(0))
    return {"inputs": images, "targets": torch.stack((images.mean((1, 2, 3)) * 5, images.amax((1, 2, 3)) - 2), dim=1)}


PAIRS = Regression((2,), mean=(0.0,), std=(1.0,))
BRIGHTNESS = Regression((1, 8, 12), mean=(0.0, 0.0), std=(1.0, 1.0))


@pytest.mark.parametrize(
    ("factory", "task", "keys", "make_batch", "lr", "steps", "share"),
    [
        ("mlp", PAIRS, MLP, products, 1e-2, 60, 0.1),
        ("images.hf", BRIGHTNESS, {"args": {"hidden_size": 64}}, brightness, 1e-3, 20, 0.5),
        ("images.denoiser", NOISY, IMAGES, noisy_batch, 3e-3, 20, 0.5),
    ],
)
def test_a_network_learns(
    factory: str, task: Any, keys: dict[str, Any], make_batch: Any, lr: float, steps: int, share: float
) -> None:
    engine = start(build(factory, task, **keys), optimizer=dtrain.AdamW(lr=lr))
    inputs, losses = make_batch(), []
    for _ in range(steps):
        loss = engine(**inputs).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    assert losses[-1] < share * losses[0]


def test_channels_last_changes_the_layout_and_no_number() -> None:
    results = []
    for channels_last in (False, True, "auto"):
        model = convnet(channels_last=channels_last)
        seen: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(lambda _, args, output, seen=seen: seen.append(output))
        output = model(**batch(TASK))
        output.loss.backward()
        assert len(seen) == 9
        for convolved in seen:
            assert convolved.is_contiguous(memory_format=torch.channels_last) is bool(channels_last)
        assert all(p.is_contiguous() for p in model.parameters())
        results.append((output.prediction, *(p.grad for p in model.parameters())))
    for plain, last, auto in zip(*results, strict=True):
        torch.testing.assert_close(plain, last, rtol=1e-4, atol=1e-5)
        assert torch.equal(last, auto), "auto has the channels last on a CPU"


def test_a_denoiser_uses_all_it_is_told() -> None:
    model, inputs = denoiser(), noisy_batch()
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
