"""Updates applied to FP16 and BF16 weights without FP32 masters: what is rounded, what is counted, what is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from dtrain.config.optim import SGD
from dtrain.engine.initialize import initialize
from dtrain.tools.experiment.master_weights import MasterWeightsResult, WithoutMasters, run
from dtrain.tools.experiment.networks import regression


@pytest.fixture(scope="module")
def result() -> MasterWeightsResult:
    """60 steps at three learning rates, one seed."""
    return run([(regression(), (1e-5, 1e-4, 1e-3), (0,))], steps=60)


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


def test_norms_keep_their_fp32_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    engine = initialize(model, precision="bf16", seed=0)
    value = torch.tensor([1.0001, 1.0, 1.0, 1.0])
    with engine.modify_weights():
        model[1].weight.copy_(value)
    WithoutMasters().start(engine)
    state = engine.master_state()
    assert torch.equal(state["1.weight"], value)
    assert torch.equal(state["0.weight"], state["0.weight"].bfloat16().float())


def test_small_updates_are_lost_without_masters(result: MasterWeightsResult) -> None:
    for precision, updates, progress in (("fp16", 0.7, 0.6), ("bf16", 0.95, 0.9)):
        (item,) = result.of("regression", precision, 1e-5)
        assert item.lost_updates > updates
        assert item.lost_progress > progress


def test_bf16_loses_at_larger_rates_than_fp16(result: MasterWeightsResult) -> None:
    for lr, updates in ((1e-4, 0.7), (1e-3, 0.1)):
        (fp16,), (bf16,) = (result.of("regression", precision, lr) for precision in ("fp16", "bf16"))
        assert fp16.lost_updates < 0.1
        assert bf16.lost_updates > updates
        assert abs(fp16.lost_progress) < 0.1
    assert result.of("regression", "bf16", 1e-4)[0].lost_progress > 0.6


def test_with_masters_both_formats_train_alike(result: MasterWeightsResult) -> None:
    for lr in (1e-5, 1e-4, 1e-3):
        (fp16,), (bf16,) = (result.of("regression", precision, lr) for precision in ("fp16", "bf16"))
        progress = fp16.untrained - fp16.with_masters.final
        assert progress > 0
        assert abs(bf16.with_masters.final - fp16.with_masters.final) < 0.02 * progress


def test_curves_cover_every_step(result: MasterWeightsResult) -> None:
    assert {len(curve.losses) for item in result.trainings for curve in (item.with_masters, item.without)} == {6}
    item = result.trainings[0]
    assert replace(item, without=item.with_masters).lost_progress == 0
