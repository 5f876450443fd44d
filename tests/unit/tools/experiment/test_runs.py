"""Short runs of the experiments show what they are about: lost sums, updates and gradients, and their recovery."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dtrain.config.optim import SGD
from dtrain.engine.initialize import initialize
from dtrain.precision.formats import BF16, FP16, FP32
from dtrain.tools.experiment import accumulation, gradient_histogram
from dtrain.tools.experiment.accumulation import MATMUL, SUMS, VECTORS
from dtrain.tools.experiment.gradient_histogram import SCALES
from dtrain.tools.experiment.master_weights import WithoutMasters
from dtrain.tools.experiment.networks import convnet, detector


def test_accumulation() -> None:
    result = accumulation.run(longest=4096, trials=16)
    assert len(result.cases) == len(VECTORS) * (len(SUMS) + 1)
    for case in result.cases:
        assert len(case.errors) == len(case.bounds) == len(result.lengths) == 12
        for error, bound in zip(case.errors, case.bounds, strict=True):
            assert bound is None or error <= bound, case
    place = result.lengths.index(16)
    for floats in SUMS:
        case = result.of("worst case", floats.name)
        bound = case.bounds[place]
        assert bound is not None
        assert 0.8 * bound < case.errors[place] <= bound
    errors = {floats: result.error("positive", floats.name, 4096) for floats in SUMS}
    assert (errors[FP16] > 0.05, errors[BF16] > 0.8, errors[FP32] < 1e-5) == (True, True, True)
    for length in result.lengths:  # a matmul of FP16 tensors sums in FP32
        assert result.error("positive", MATMUL, length) <= FP16.unit_roundoff + 1e-5


# -- gradients of activations ------------------------------------------------------------------------------------------


def test_a_scale_recovers_the_gradients_of_a_detector_and_a_classifier_needs_none() -> None:
    found, other = gradient_histogram.run([detector(), convnet()], steps=30).networks
    counted = found.counted()
    assert counted.total == 30 * 16 * (2 * 8 * 16**2 + 2 * 16 * 8**2 + 64 + 3)
    assert 0.5 < counted.zeros / counted.total < 0.8  # 66.8 % in the paper's detector
    shares = [found.flushed(scale) for scale in SCALES]
    assert shares == sorted(shares, reverse=True)
    assert (SCALES[0], SCALES[-1]) == (1, 32768)
    assert shares[0] > 0.999
    assert shares[-1] < 0.05
    assert counted.overflowing(FP16, SCALES[-1]) == 0
    assert other.flushed() < 0.02


# -- weights without masters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_is_the_loop_that_updates_rounded_weights(dtype: torch.dtype) -> None:
    """The same bits as a loop without dtrain that keeps nothing but 16-bit weights."""
    start, lr, scale = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), 2.0**-8, 2.0**6
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    model = nn.Linear(8, 8, bias=False)
    model.weight.data.copy_(start)
    rule = SGD(lr=lr, momentum=0.0)
    engine = initialize(model, optimizer=rule, precision=dtype, loss_scale=scale, max_grad_norm=None, seed=0)
    observer = WithoutMasters()
    observer.start(engine)
    weight = start.to(dtype)
    updates = lost = 0
    for _ in range(20):
        engine.backward(engine(x).square().mean())
        engine.step()
        observer.step(engine)
        leaf = weight.clone().requires_grad_()
        ((x.to(dtype) @ leaf.T).float().square().mean() * scale).backward()
        assert leaf.grad is not None
        moved = weight.float() - lr * (leaf.grad.float() / scale)
        updates += int((moved != weight.float()).sum())
        lost += int(((moved != weight.float()) & (moved.to(dtype) == weight)).sum())
        weight = moved.to(dtype)
    assert torch.equal(engine.master_state()["weight"], weight.float())
    assert (observer.updates, observer.lost) == (updates, lost)
    assert 0 < lost < updates
