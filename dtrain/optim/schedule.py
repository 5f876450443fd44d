"""Learning-rate schedules: pure functions of the number of applied steps.

A skipped step does not advance them, so the schedule and Adam's bias correction stay in line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from dtrain.errors import ConfigError


class Schedule(Protocol):
    """A learning-rate schedule: a frozen record, so that ranks can compare it."""

    def factor(self, step: int) -> float:
        """Returns the learning rate of the update after ``step`` applied ones, as a fraction of the peak."""


def _check(warmup_steps: int, total_steps: int | None, min_ratio: float) -> None:
    if warmup_steps < 0:
        raise ConfigError(f"warmup_steps must be at least 0; got {warmup_steps}")
    if total_steps is not None and total_steps < max(1, warmup_steps):
        raise ConfigError(f"total_steps={total_steps} must be at least 1 and at least warmup_steps={warmup_steps}")
    if not 0 <= min_ratio <= 1:
        raise ConfigError(f"min_ratio must lie between 0 and 1; got {min_ratio:g}")


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def _progress(step: int, start: int, stop: int) -> float:
    return 1.0 if stop <= start else min(max((step - start) / (stop - start), 0.0), 1.0)


@dataclass(frozen=True)
class Constant:
    """Linear warm-up over ``warmup_steps``, then the peak permanently."""

    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _check(self.warmup_steps, None, 0.0)

    def factor(self, step: int) -> float:
        """Returns the fraction of the peak after ``step`` applied steps."""
        return _warmup(step, self.warmup_steps)


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up, then half a cosine to ``min_ratio`` at ``total_steps`` (Loshchilov and Hutter, SGDR, 2017)."""

    warmup_steps: int
    total_steps: int
    min_ratio: float = 0.1

    def __post_init__(self) -> None:
        _check(self.warmup_steps, self.total_steps, self.min_ratio)

    def factor(self, step: int) -> float:
        """Returns the fraction of the peak after ``step`` applied steps."""
        if step < self.warmup_steps:
            return _warmup(step, self.warmup_steps)
        progress = _progress(step, self.warmup_steps, self.total_steps)
        return self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Linear:
    """Linear warm-up, then a straight line to ``min_ratio`` at ``total_steps``."""

    warmup_steps: int
    total_steps: int
    min_ratio: float = 0.1

    def __post_init__(self) -> None:
        _check(self.warmup_steps, self.total_steps, self.min_ratio)

    def factor(self, step: int) -> float:
        """Returns the fraction of the peak after ``step`` applied steps."""
        if step < self.warmup_steps:
            return _warmup(step, self.warmup_steps)
        return 1 - (1 - self.min_ratio) * _progress(step, self.warmup_steps, self.total_steps)


@dataclass(frozen=True)
class WSD:
    """Warm-up, stable, decay (Hu et al., MiniCPM, 2024): the last ``decay_steps`` fall linearly to ``min_ratio``."""

    warmup_steps: int
    total_steps: int
    decay_steps: int
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        _check(self.warmup_steps, self.total_steps, self.min_ratio)
        if not 0 <= self.decay_steps <= self.total_steps - self.warmup_steps:
            raise ConfigError(
                f"decay_steps={self.decay_steps} must fit between warmup_steps={self.warmup_steps} "
                f"and total_steps={self.total_steps}"
            )

    def factor(self, step: int) -> float:
        """Returns the fraction of the peak after ``step`` applied steps."""
        if step < self.warmup_steps:
            return _warmup(step, self.warmup_steps)
        start = self.total_steps - self.decay_steps
        if step < start:
            return 1.0
        return 1 - (1 - self.min_ratio) * _progress(step, start, self.total_steps)
