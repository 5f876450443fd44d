"""What precision costs a step, the explanation of a skip, and the probe, on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import dtrain
from dtrain.__main__ import main
from dtrain.config.model import ModelConfig
from dtrain.engine.interface import Engine
from dtrain.models import build_model
from dtrain.precision.histogram import count_magnitudes
from dtrain.precision.report import PrecisionReport
from tests.gpu.device import DEVICE, capability, needs_gpu, synchronize
from tests.unit.tools.probe.tiny import TINY

VOCAB = 300
CONFIG = ModelConfig(num_layers=2, hidden_dim=128, num_heads=4, max_seq_len=64)
FP8 = pytest.param("fp8", marks=pytest.mark.skipif((0, 0) < capability() < (8, 9), reason="FP8 needs 8.9 or later"))


def start(precision: str) -> Engine:
    model = build_model(CONFIG, VOCAB, seed=0).to(DEVICE)
    return dtrain.initialize(model, optimizer=dtrain.AdamW(lr=1e-3), precision=precision, loss_scale="none", seed=0)


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
    plain, measured = start(precision), start(precision)
    step(plain)
    with measured.measure_precision(["blocks.*"]) as measurement:
        step(measured)
    report = measurement.report()
    assert isinstance(report, PrecisionReport)
    before, after = plain.master_state(), measured.master_state()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {own.name: own.gradient.total for own in report.parameters} == {n: 2 * p.numel() for n, p in before.items()}
    assert all(own.update is not None for own in report.parameters)
    assert report.activations
    assert bool(report.float8) == (precision == "fp8")


@needs_gpu("the host waits for no CPU; tests/unit has this on fake devices")
@pytest.mark.parametrize("precision", ["bf16", FP8])
def test_a_measured_step_waits_only_in_the_report(precision: str) -> None:
    engine = start(precision)
    for _ in range(2):
        step(engine)
    synchronize()
    with engine.measure_precision() as measurement:
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(engine)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert measurement.report() is not None


def test_a_skip_names_its_module() -> None:
    engine = start("bf16")
    engine.explain_skips = True
    with engine.modify_weights("blocks.1.ffn.down"):
        engine.module.get_submodule("blocks.1.ffn.down").weight[3, 5] = torch.inf
    outcome = step(engine)
    assert outcome.reason == "nonfinite_loss"
    assert outcome.culprit is not None
    assert outcome.culprit.origin is not None
    assert (outcome.culprit.origin.module, outcome.culprit.origin.place) == ("blocks.1.ffn.down", "output")


def test_a_probe(tmp_path: Path) -> None:
    assert main(["probe", *TINY, f"launch.device={DEVICE.type}", f"run_dir={tmp_path}"]) == 0
    values = json.loads((tmp_path / "probe.json").read_text(encoding="utf-8"))
    formats = {trial["format"]: trial for trial in values["trials"]}
    assert {"fp32", "bf16", "fp16", "fp8"} <= formats.keys()
    assert all(trial["failure"] is None for trial in formats.values())
    assert formats["bf16"]["ms_per_step"]
