"""Trains a small network with the native engine: the loop that all experiments share."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from dtrain.engine.initialize import initialize
from dtrain.engine.interface import Engine
from dtrain.measure.experiment.networks import SmallNetwork

BLOCK = 10
"""Steps whose losses are averaged."""

_EVAL_SEED = 2**40
_EVAL_BATCHES = 16


@dataclass(frozen=True)
class LossCurve:
    """One training.

    Attributes:
        losses: of the batches, means over :data:`BLOCK` steps each.
        final: mean loss over held-out batches after the last step, the same batches for every training.
        skipped: number of skipped steps.
        loss_scale: of the last step.
    """

    losses: list[float]
    final: float
    skipped: int
    loss_scale: float

    def points(self) -> tuple[list[float], list[float]]:
        """Returns the middle of each block of steps, and its loss."""
        return [BLOCK * (index + 0.5) for index in range(len(self.losses))], self.losses


def train(
    network: SmallNetwork,
    precision: str,
    steps: int,
    *,
    seed: int,
    loss_scale: str | float = "auto",
    on_start: Callable[[Engine], None] = lambda engine: None,
    on_step: Callable[[Engine], None] = lambda engine: None,
) -> LossCurve:
    """Trains on batches that depend only on ``seed``, which also draws the initial weights; 0 steps only evaluate.

    ``on_start`` is called before the first step, and ``on_step`` after each.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = network.build()
    engine = initialize(model, optimizer=network.optimizer, precision=precision, loss_scale=loss_scale, seed=seed)
    on_start(engine)
    losses, skipped, scale = [], 0, 1.0
    for inputs, targets in _batches(network, seed, steps, engine.device):
        engine.backward(network.loss(engine(inputs), targets))
        outcome = engine.step()
        losses.append(outcome.loss)
        skipped += not outcome.applied
        scale = outcome.loss_scale
        on_step(engine)
    means = [statistics.fmean(losses[start : start + BLOCK]) for start in range(0, steps, BLOCK)]
    curve = LossCurve(means, _evaluate(network, engine), skipped, scale)
    report(f"{network.name}, {precision}, seed {seed}: loss {curve.final:.4g}")
    return curve


def _batches(network: SmallNetwork, seed: int, count: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    generator = Generator().manual_seed(seed)
    for _ in range(count):
        inputs, targets = network.draw(generator)
        yield inputs.to(device), targets.to(device)


def _evaluate(network: SmallNetwork, engine: Engine) -> float:
    with engine.eval():
        batches = _batches(network, _EVAL_SEED, _EVAL_BATCHES, engine.device)
        return statistics.fmean(network.loss(engine(inputs), targets).item() for inputs, targets in batches)


def report(line: str) -> None:
    """Prints progress where a person watches."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
