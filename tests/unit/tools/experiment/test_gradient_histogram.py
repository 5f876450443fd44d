"""Counts of activation gradients, and their recovery by a loss scale."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dtrain.engine.initialize import initialize
from dtrain.precision.formats import FP16
from dtrain.precision.histogram import Histogram
from dtrain.tools.experiment.gradient_histogram import (
    SCALES,
    ActivationGradients,
    NetworkGradients,
    run,
)
from dtrain.tools.experiment.networks import convnet, detector


@pytest.fixture(scope="module")
def gradients() -> dict[str, NetworkGradients]:
    """30 steps of two networks, seed 0."""
    return {item.network: item for item in run([detector(), convnet()], steps=30).networks}


def test_counts_the_gradient_of_every_product() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    x = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    expected = Histogram.of(torch.zeros(0))
    activation = model[0](x).detach().requires_grad_()
    output = model[3](torch.relu(activation).flatten(1))
    output.retain_grad()
    output.square().mean().backward()
    for gradient in (activation.grad, output.grad):
        expected += Histogram.of(gradient)
    model.zero_grad()
    engine, observer = initialize(model, precision="fp32", seed=0), ActivationGradients()
    observer.start(engine)
    engine.backward(engine(x).square().mean())
    assert observer.histogram() == expected
    with engine.eval():
        engine(x)
    assert observer.histogram() == expected


def test_fp16_flushes_nearly_all_of_the_detector(gradients: dict[str, NetworkGradients]) -> None:
    found = gradients["detector"]
    counted = found.counted()
    assert counted.total == 30 * 16 * (2 * 8 * 16**2 + 2 * 16 * 8**2 + 64 + 3)
    assert 0.5 < counted.zeros / counted.total < 0.8  # 66.8 % in the paper's detector
    assert found.flushed() > 0.999


def test_a_scale_recovers_them(gradients: dict[str, NetworkGradients]) -> None:
    found = gradients["detector"]
    shares = [found.flushed(scale) for scale in SCALES]
    assert shares == sorted(shares, reverse=True)
    assert (SCALES[0], SCALES[-1]) == (1, 32768)
    assert shares[-1] < 0.05
    assert found.counted().overflowing(FP16, SCALES[-1]) == 0


def test_a_classifier_needs_no_scale(gradients: dict[str, NetworkGradients]) -> None:
    assert gradients["convnet"].flushed() < 0.02
