"""A network that learns nothing in FP16 without loss scaling, and follows FP32 with it."""

from __future__ import annotations

import pytest

from dtrain.tools.experiment.loss_scaling import LossScalingResult, run


@pytest.fixture(scope="module")
def result() -> LossScalingResult:
    """60 steps, seed 0: the fewest after which FP32 is under the bound below by a quarter."""
    return run(steps=60, seeds=(0,), scales=("none", 32768.0, "dynamic"))


def test_fp32_learns(result: LossScalingResult) -> None:
    assert result.fp32 < 0.12  # of the variance


def test_fp16_without_scaling_learns_nothing(result: LossScalingResult) -> None:
    assert result.final("fp16", "none") > 0.85


@pytest.mark.parametrize("scale", ["32768", "dynamic"])
def test_fp16_with_scaling_follows_fp32(result: LossScalingResult, scale: str) -> None:
    assert result.final("fp16", scale) == pytest.approx(result.fp32, rel=0.15)
    (fp32,), (fp16,) = result.of("fp32", "none"), result.of("fp16", scale)
    assert fp16.curve.skipped <= 2
    assert len(fp16.curve.losses) == 6
    assert fp16.curve.losses == pytest.approx(fp32.curve.losses, rel=0.15)
