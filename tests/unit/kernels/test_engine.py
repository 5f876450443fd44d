"""The native engine with the kernels that it uses on a GPU, against the engine with tensor code."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import dtrain
from dtrain.config.model import ModelConfig
from dtrain.engine.native import NativeEngine
from dtrain.models import build_model
from dtrain.sharding.layout import CHUNK

pytest.importorskip("dtrain.kernels.tiles", reason="Triton is not installed")

CONFIG = ModelConfig(num_layers=1, hidden_dim=32, num_heads=2, max_seq_len=16)
VOCAB, STEPS = 64, 4
RULE = dtrain.AdamW(lr=1e-2, compile=False)


def make_engine(precision: str, *, kernels: bool, **options: Any) -> NativeEngine:
    engine = dtrain.initialize(
        build_model(CONFIG, VOCAB, seed=0), optimizer=RULE, precision=precision, max_grad_norm=0.5, seed=0, **options
    )
    assert isinstance(engine, NativeEngine)
    if kernels:
        from dtrain.engine.vote.fused import fused_vote
        from dtrain.optim.tiled import TiledAdamW

        slices = [buffer.update_slices(engine.plan) for buffer in engine.sharded.buffers]
        engine._optimizer._kernels = [TiledAdamW(RULE, slices)]
        grads = [buffer.gradient.shard for buffer in engine.sharded.buffers]
        engine._square_sums, engine._vote_tensors = fused_vote(grads, CHUNK, engine.options, engine.comm)
        engine.monitor.found = engine._vote_tensors.bad_gradient
    return engine


def train(engine: NativeEngine, micro_batches: int, *, bad: tuple[int, int] | None = None) -> list[dtrain.StepOutcome]:
    """Trains; the gradient of the first weight of backward is Inf in step and micro-batch ``bad``."""
    weight = dict(engine.module.named_parameters())[engine.backward_names[-1]]
    outcomes = []
    for step in range(STEPS):
        for number, tokens in enumerate(engine.accumulate(list(batch(step, micro_batches)))):
            factor = math.inf if (step, number) == bad else 1.0
            handle = weight.register_hook(lambda grad, factor=factor: grad * factor)
            engine.backward(engine(tokens[:, :-1], tokens[:, 1:]).loss, weight=1 + number)
            handle.remove()
        outcomes.append(engine.step())
    return outcomes


def batch(step: int, micro_batches: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCAB, (micro_batches, 2, CONFIG.max_seq_len + 1), generator=generator)


@pytest.mark.parametrize(("precision", "reproducible", "micro_batches"), [("bf16", False, 2), ("fp32", True, 2)])
def test_trains_as_with_tensor_code(precision: str, reproducible: bool, micro_batches: int) -> None:
    bad = (2, micro_batches - 1)
    engines = [make_engine(precision, kernels=kernels, reproducible=reproducible) for kernels in (True, False)]
    got, want = (train(engine, micro_batches, bad=bad) for engine in engines)
    assert [outcome.applied for outcome in want] == [True, True, False, True]
    for mine, other in zip(got, want, strict=True):
        assert (mine.applied, mine.reason, mine.culprit) == (other.applied, other.reason, other.culprit)
        assert mine.loss == pytest.approx(other.loss, rel=1e-4 if precision == "bf16" else 1e-6)
        if other.applied:
            assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-2 if precision == "bf16" else 1e-5)
    states = [engine.master_state() for engine in engines]
    for name, value in states[1].items():
        torch.testing.assert_close(states[0][name], value, rtol=0.0, atol=2e-3 if precision == "bf16" else 1e-5)
