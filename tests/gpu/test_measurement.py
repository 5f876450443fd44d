"""What precision costs a step, the explanation of a skip, and the probe, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtrain
from dtrain.engine.interface import Engine
from dtrain.precision.histogram import count_magnitudes
from tests.gpu.device import DEVICE, capability, no_waits
from tests.gpu.test_engine import CONFIG, VOCAB, make_engine

FP8 = pytest.param("fp8", marks=pytest.mark.skipif((0, 0) < capability() < (8, 9), reason="FP8 needs 8.9 or later"))


def step(engine: Engine) -> dtrain.StepOutcome:
    generator = torch.Generator().manual_seed(engine.attempted_steps)
    tokens = torch.randint(VOCAB, (2, 4, CONFIG.max_seq_len + 1), generator=generator).to(DEVICE)
    for micro in engine.accumulate(tokens):
        engine.backward(engine(tokens=micro[:, :-1].contiguous(), targets=micro[:, 1:].contiguous()).loss)
    return engine.step()


def test_counts_are_those_of_a_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3_000_001, generator=generator) * torch.exp2(12 * torch.randn(3_000_001, generator=generator))
    x[:3] = torch.tensor([0.0, torch.inf, torch.nan])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(count_magnitudes(x.to(dtype).to(DEVICE)).cpu(), count_magnitudes(x.to(dtype)))


@pytest.mark.parametrize("precision", ["bf16", FP8])
def test_a_measured_step_keeps_its_bits(precision: str) -> None:
    plain, measured = (make_engine(precision) for _ in range(2))
    step(plain)
    step(plain)
    step(measured)  # what is used again is allocated
    with measured.measure_precision(["blocks.*"]) as measurement, no_waits():  # only the report waits
        step(measured)
    report: Any = measurement.report()
    before, after = plain.master_state(), measured.master_state()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {own.name: own.gradient.total for own in report.parameters} == {n: 2 * p.numel() for n, p in before.items()}
    assert all(own.update is not None for own in report.parameters)
    assert report.activations
    assert bool(report.float8) == (precision == "fp8")


def test_a_skip_names_its_module() -> None:
    engine = make_engine("bf16")
    engine.explain_skips = True
    with engine.modify_weights("blocks.1.ffn.down"):
        engine.module.get_submodule("blocks.1.ffn.down").weight[3, 5] = torch.inf
    outcome: Any = step(engine)
    assert outcome.reason == "nonfinite_loss"
    assert (outcome.culprit.origin.module, outcome.culprit.origin.place) == ("blocks.1.ffn.down", "output")
