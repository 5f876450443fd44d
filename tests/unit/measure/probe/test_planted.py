"""Planted weaknesses: the right advice for every seed, and a gap below two units of noise for who follows it."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtrain
from dtrain.cli.resolve import compose
from dtrain.measure.noise import Noise
from dtrain.measure.probe.advice import advise
from dtrain.measure.probe.evidence import Evidence
from dtrain.measure.probe.flips import flip
from dtrain.measure.probe.records import Advice, Analysis, Trial
from dtrain.measure.probe.sensitivity import analyze
from dtrain.measure.probe.trials import quiet

STEPS = 10
_ROWS, _WIDTH, _HIDDEN = 32, 16, 32
_MEASURED = 3  # last steps, whose mean is the final loss


class Fitted(nn.Module):
    """Its loss is the squared error, times a factor."""

    factor = 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.predict(x).float() - y).square().mean() * self.factor

    def predict(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Regression(Fitted):
    """An MLP."""

    def __init__(self, middle: nn.Module, factor: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _HIDDEN)
        self.middle = middle
        self.last = nn.Linear(_HIDDEN, 4)
        self.factor = factor

    def predict(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.middle(F.gelu(self.first(x)))))


class OutlierChannel(Fitted):
    """One input of `mix` is 300 and a signal of 15, which a bias makes up for: FP8 rounds it to multiples of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _HIDDEN)
        self.mix = nn.Linear(_HIDDEN, _HIDDEN)
        self.deep = nn.Linear(_HIDDEN, _HIDDEN)
        self.last = nn.Linear(_HIDDEN, 4)
        with torch.no_grad():
            self.mix.weight[:, 0] = 0.06 * self.mix.weight[:, 0].sign()
            self.mix.bias -= 300 * self.mix.weight[:, 0]

    def predict(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = torch.cat((300 + 15 * x[:, :1], hidden[:, 1:].float()), dim=1)
        return self.last(torch.tanh(self.deep(torch.tanh(self.mix(hidden)))))


class ExpLoss(nn.Module):
    """Poisson's deviance of log rates; exp overflows in FP16 from 11.09 on."""

    def forward(self, log_rate: Tensor, log_counts: Tensor) -> Tensor:
        deviance = torch.exp(log_rate) - torch.exp(log_counts) * (1 + log_rate - log_counts)
        return deviance.mean() / 1e5


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _HIDDEN)
        self.last = nn.Linear(_HIDDEN, 4)
        self.loss = ExpLoss()
        with torch.no_grad():
            self.last.bias += 11.5

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.predict(x), y)

    def predict(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.first(x)))


class LargeLogits(nn.Module):
    """Attention whose logits are about 3,100 and differ by a few, which BF16 rounds to multiples of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(_WIDTH, 8)
        self.key = nn.Linear(_WIDTH, 8)
        with torch.no_grad():
            for linear in (self.query, self.key):
                linear.weight *= 3
                linear.weight[0] = 0.0
                linear.bias[0] = 56.0

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.query(x) @ self.key(x).transpose(-1, -2), dim=-1)
        return weights.to(x.dtype) @ x


class Attending(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.attn = LargeLogits()
        self.last = nn.Linear(_WIDTH, 4)

    def predict(self, x: Tensor) -> Tensor:
        groups = self.norm(x).unflatten(0, (-1, 8))
        return self.last(self.attn(groups)).flatten(0, 1)


@dataclass(frozen=True)
class Planted:
    """A model, how it is trained and tried, and the advice that is right for it."""

    build: Callable[[], nn.Module]
    formats: tuple[str, ...]  # tried beside FP32
    precision: str  # the right advice, with the rules
    rules: Mapping[str, str] = field(default_factory=dict)
    milliseconds: Mapping[str, float] = field(default_factory=dict)  # of a step; a format without counts as emulated
    loss_scale: str | float = "auto"  # of the trials
    eps: float = 1e-8
    lr: float = 3e-3
    distance: float = 0.1  # of the last weights from those that made the targets


def linear() -> nn.Module:
    return nn.Linear(_HIDDEN, _HIDDEN)


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(_HIDDEN, 8), nn.Linear(8, _HIDDEN))


_FAST = {"fp32": 40.0, "fp8": 15.0}

MODELS = {
    "healthy": Planted(lambda: Regression(linear()), ("bf16", "fp16"), "bf16"),
    "tiny gradients": Planted(lambda: Regression(linear(), 1e-7), ("fp16",), "fp16", loss_scale="none", eps=1e-15),
    "outlier channel": Planted(OutlierChannel, ("fp8",), "fp8", {"mix": "bf16"}, _FAST, lr=1e-4, distance=0.025),
    "exp in a loss": Planted(Counts, ("fp16",), "fp16", {"loss": "fp32"}),
    "large-norm softmax": Planted(Attending, ("bf16",), "bf16", {"attn": "fp32"}, lr=1e-4, distance=0.02),
    "narrow matrix": Planted(lambda: Regression(narrow()), ("fp8",), "fp8", {}, _FAST),
}


def build(planted: Planted, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return planted.build()


def batches(planted: Planted, seed: int) -> list[dict[str, Tensor]]:
    """Returns the inputs of each step, the same for all seeds, and targets from a model near that of the seed."""
    teacher = build(planted, seed)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS, _ROWS, _WIDTH, generator=generator)
    with torch.no_grad():
        teacher.last.weight += planted.distance * torch.randn(teacher.last.weight.shape, generator=generator)
        return [{"x": rows, "y": teacher.predict(rows)} for rows in x]


def train(planted: Planted, seed: int, kind: str, rules: Mapping[str, str], scale: str | float | None = None) -> Trial:
    """Trains for a few steps with the native engine; the gap is left at the final loss."""
    policy = dtrain.PrecisionPolicy.named(kind, rules=rules)
    engine = dtrain.initialize(
        build(planted, seed),
        optimizer=dtrain.AdamW(lr=planted.lr, eps=planted.eps),
        precision=policy,
        loss_scale=planted.loss_scale if scale is None else scale,
        max_grad_norm=None,
        seed=seed,
    )
    losses, skipped = [], 0
    for batch in batches(planted, seed):
        engine.backward(engine(**batch))
        outcome = engine.step()
        skipped += not outcome.applied
        losses.append(outcome.loss)
    final = statistics.fmean(losses[-_MEASURED:])
    failure = None if math.isfinite(final) else "the loss is not finite"
    time = planted.milliseconds.get(kind)
    return Trial(kind, dict(rules), losses, time, 0, math.nan, skipped, outcome.loss_scale, final, failure)


def examine(planted: Planted, seed: int, fp32: Trial, seed_noise: float) -> tuple[Advice, Trial, Analysis]:
    """Returns the advice, a trial that follows it, and the analysis; ``fp32`` is that of the seed.

    The seed's noise comes from the FP32 trials of all seeds, a better estimate than one from two or three.
    """

    done: dict[tuple[object, ...], Trial] = {}  # trials repeat to the bit

    def trial(format_name: str, rules: Mapping[str, str], loss_scale: float | None = None) -> Trial:
        key = (format_name, *rules.items(), loss_scale)
        if key not in done:
            found = train(planted, seed, format_name, rules, loss_scale)
            done[key] = replace(found, gap=found.gap - fp32.gap)
        return done[key]

    trials = [replace(fp32, gap=0.0), *(trial(name, {}) for name in planted.formats)]
    model, micro_batches = build(planted, seed), batches(planted, seed)[:2]
    analysis = analyze(model, micro_batches, planted.formats)
    flips = flip(model, micro_batches, analysis, planted.precision, num=1)
    advice = advise(Evidence(trials, Noise(0.0, seed_noise), analysis, flips, "a test"), trial)
    followed = trial(advice.precision, {rule.pattern: rule.format for rule in advice.rules}, advice.loss_scale)
    return advice, followed, analysis


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Engines of FP16 without a loss scale warn, and 400 engines say much."""
    with quiet():
        yield


@pytest.mark.parametrize("num_seeds", [1, pytest.param(20, marks=pytest.mark.exhaustive)])
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
