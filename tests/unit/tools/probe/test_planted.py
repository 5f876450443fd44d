"""Planted weaknesses: the right advice for every seed, and a gap below two units of noise for who follows it."""

from __future__ import annotations

import logging
import shlex
import statistics
from collections.abc import Iterator

import pytest

from dtrain.cli.resolve import compose
from dtrain.distributed.logging import logger
from dtrain.tools.probe.records import Advice, Analysis
from tests.helpers.planted import MODELS, examine, train


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Engines of FP16 without a loss scale warn, and 400 engines say much."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.mark.parametrize("num_seeds", [2, pytest.param(20, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", MODELS)
def test_right_advice_for_every_seed(name: str, num_seeds: int) -> None:
    planted = MODELS[name]
    references = [train(planted, seed, "fp32", {}) for seed in range(max(num_seeds, 6))]
    noise = statistics.stdev(reference.gap for reference in references)
    for seed, reference in enumerate(references[:num_seeds]):
        advice, followed, analysis = examine(planted, seed, reference, noise)
        rules = {rule.pattern: rule.format for rule in advice.rules}
        assert (advice.precision, rules) == (planted.precision, planted.rules), (seed, advice)
        assert (advice.loss_scale is not None) == (planted.precision == "fp16")
        assert followed.failure is None
        assert followed.gap < 2 * noise, (seed, followed.gap / noise)
        _check_reasons(name, advice, analysis)
    precision = compose([*shlex.split(advice.line), "model.hidden_dim=64"]).precision  # the line is accepted
    assert (precision.name, precision.rules) == (planted.precision, planted.rules)
    if advice.loss_scale is not None:
        assert (precision.loss_scale.mode, precision.loss_scale.init) == ("static", advice.loss_scale)


_CAUSES = {
    "outlier channel": ("mix", "fprop", "fp8", "precision"),
    "exp in a loss": ("loss", "forward", "fp16", "range"),
    "large-norm softmax": ("attn", "forward", "bf16", "precision"),
}


def _check_reasons(name: str, advice: Advice, analysis: Analysis) -> None:
    causes = {(r.module, r.product, r.format, r.cause) for r in analysis.products}
    if name in _CAUSES:
        assert _CAUSES[name] in causes
        assert f"({_CAUSES[name][-1]})" in advice.rules[0].reason
    if name == "tiny gradients":  # at scale 1 they are lost by range, at the advised scale they are not
        lost = {(r.module, r.product) for r in analysis.unscaled if r.cause == "range" and r.sqnr_db < 1}
        assert {("middle", "dgrad"), ("middle", "wgrad"), ("first", "wgrad")} <= lost
        assert not any(r.cause for r in analysis.products if r.format == "fp16")
        assert any("without a loss scale FP16 loses gradients by range" in reason for reason in advice.reasons)
    if name == "narrow matrix":
        assert any("middle.0, middle.1" in reason and "below 16" in reason for reason in advice.reasons)
    if name == "healthy":
        assert not any(r.cause for r in analysis.products)
