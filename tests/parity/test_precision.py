"""Silent failures of low precision: gradients that FP16 flushes to zero, and sums that BF16 stalls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.engine.adapters.native import NativeEngine
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, forward_backward, start


def train(precision: str, loss_scale: str | float) -> tuple[list[float], float, float]:
    """Losses, the share of zero elements in the first main grads, and the last loss scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(64, 16)
    y = torch.sin(x.sum(dim=1, keepdim=True))
    engine = dtrain.initialize(
        model,
        optimizer=dtrain.AdamW(lr=1e-2, weight_decay=0.0, eps=1e-16),
        precision=precision,
        loss_scale=loss_scale,
        max_grad_norm=None,
        seed=0,
    )
    assert isinstance(engine, NativeEngine)
    losses, zeros = [], 0.0
    for step in range(60):
        # a small factor, as in the sum of many terms of one loss: gradients of 1e-9, FP16 ends at 6e-8
        loss = 1e-6 * (engine(x) - y).square().mean()
        engine.backward(loss)
        if step == 0:
            engine.finish_gradients()
            grads = [g for _, g in engine.states.full_state("main_grad")]
            zeros = sum(int((g == 0).sum()) for g in grads) / sum(g.numel() for g in grads)
        losses.append(engine.step().loss * 1e6)
    return losses, zeros, engine.loss_scale.scale


def test_underflow_is_fixed_by_scaling() -> None:
    exact, _, _ = train("fp32", "none")
    bare, bare_zeros, _ = train("fp16", "none")
    scaled, scaled_zeros, _ = train("fp16", "dynamic")
    calibrated, _, scale = train("fp16", "calibrated")
    assert bare_zeros > 0.9, "without scaling most gradients flush to zero"
    assert scaled_zeros < 0.02
    assert exact[-1] < 0.5 * exact[0], "the FP32 run learns"
    assert bare[-1] > 0.8 * bare[0], "the unscaled FP16 run does not"
    assert abs(scaled[-1] - exact[-1]) < 0.05 * exact[0], "the scaled FP16 run matches FP32"
    assert abs(calibrated[-1] - exact[-1]) < 0.05 * exact[0], "so does the one whose scale was measured"
    assert scale == 2.0**24, "gradients so small want the largest scale there may be"


def state(engine: Any) -> list[Tensor]:
    return [
        shard.data.clone() for kind in ("master", "exp_avg", "exp_avg_sq") for shard in engine.states.local_shards(kind)
    ]


def overflow_then_recover(rank: int, world: int, name: str) -> list[tuple[dtrain.StepOutcome, bool]]:
    """A scale so large that FP16 gradients overflow until it has backed off far enough."""
    run = Run("transformer", accumulation=2, unequal_weights=True, options={"engine": name, "precision": "fp16"})
    engine = start(run, loss_scale=dtrain.LossScale(mode="dynamic", init=2.0**24))
    found = []
    for step in range(12):
        before = state(engine)
        forward_backward(engine, run, step)
        outcome = engine.step()
        found.append((outcome, all(map(torch.equal, before, state(engine)))))
    return found


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["native", "ddp", pytest.param("fsdp2", marks=pytest.mark.exhaustive)])
def test_fp16_backs_off_until_steps_apply(engine: str) -> None:
    first, second = run_ranks(2, overflow_then_recover, engine)
    applied = [outcome.applied for outcome, _ in first]
    assert not applied[0]
    assert all(applied[applied.index(True) :])
    for number, ((outcome, kept), (other, also_kept)) in enumerate(zip(first, second, strict=True)):
        assert repr(outcome) == repr(other)
        assert kept is also_kept is not outcome.applied
        assert outcome.loss_scale == 2.0 ** (24 - min(number, applied.index(True)))
        if not outcome.applied:
            assert outcome.reason == "overflow"
            assert outcome.culprit is not None
            assert outcome.culprit.phase == "local gradient", "in FP16 a gradient overflows where it is made"
            assert outcome.culprit.num_inf + outcome.culprit.num_nan > 0


def test_the_gradient_of_a_frequent_token_is_summed_in_fp32() -> None:
    """2,048 addends of 0.01: a BF16 running sum stalls at 4, which is what plain autograd gives on CPU."""
    tokens = torch.full((2048,), 3)
    plain = nn.Embedding(8, 4).to(torch.bfloat16)
    (plain(tokens) * 0.01).float().sum().backward()
    assert plain.weight.grad is not None
    assert float(plain.weight.grad[3].max()) < 10, "the defect is gone: the guard may go too"
    engine = dtrain.initialize(nn.Embedding(8, 4), precision="bf16", seed=0)
    assert isinstance(engine, NativeEngine)
    engine.backward((engine(tokens) * 0.01).float().sum())
    engine.finish_gradients()
    ((_, grad),) = engine.states.full_state("main_grad")
    torch.testing.assert_close(grad[3], torch.full((4,), 20.48), rtol=5e-3, atol=0)
