"""Learning-rate schedules: pure functions of the number of applied steps.

A skipped step does not advance them, so the schedule and Adam's bias correction stay in line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from dtrain.config.fields import CheckedRecord, at_least, between, option
from dtrain.errors import ConfigError


class Schedule(Protocol):
    """A learning-rate schedule: a frozen record, so that ranks can compare it."""

    def factor(self, step: int) -> float:
        """Returns the learning rate of the update after ``step`` applied ones, as a fraction of the peak."""


Chosen = TypeVar("Chosen", bound="ScheduleConfig")
_WARMUP = "Steps of linear warm-up; null: a tenth of total_steps, rounded down, at most 20."
_TOTAL = "Applied steps of the whole schedule; null: train.steps."
_MIN_RATIO = "Share of the peak learning rate that is left at the end."


@dataclass(frozen=True)
class ScheduleConfig(CheckedRecord):
    """Learning rate as a function of applied steps."""

    name: str = option("cosine")
    warmup_steps: int | None = at_least(None, 0, _WARMUP)
    total_steps: int | None = at_least(None, 1, _TOTAL)

    def _check(self) -> None:
        if self.total_steps is not None and self._warmup > self.total_steps:
            raise ConfigError(
                f"{self._entry('warmup_steps')} is more than {self._entry('total_steps')}; "
                f"set {self._key('warmup_steps')} to at most {self.total_steps}"
            )

    def over(self: Chosen, total_steps: int | None = None) -> Chosen:
        """Returns the schedule without nulls, for a run of ``total_steps`` unless the schedule has its own number.

        null stays null in ``config.yaml``: a run resumed with other ``train.steps`` follows the new number.

        Raises:
            ConfigError: the warm-up is longer than the run, or the number of steps is unknown.
        """
        known = self if self.total_steps is not None else replace(self, total_steps=total_steps)
        return replace(known, warmup_steps=known._warmup, total_steps=known._total or None)

    def factor(self, step: int) -> float:
        """Returns the fraction of the peak after ``step`` applied steps."""
        return (step + 1) / self._warmup if step < self._warmup else self._after_warmup(step)

    def _after_warmup(self, step: int) -> float:
        raise NotImplementedError

    @property
    def _warmup(self) -> int:
        return min(20, self._total // 10) if self.warmup_steps is None else self.warmup_steps

    @property
    def _total(self) -> int:
        if self.total_steps is None:
            raise ConfigError(f"{self._key('total_steps')} is null; give the number of steps over which the rate falls")
        return self.total_steps

    def _progress(self, step: int, start: int) -> float:
        """The share of the steps from ``start`` to the end that lies before ``step``."""
        return 1.0 if self._total <= start else min(max((step - start) / (self._total - start), 0.0), 1.0)


@dataclass(frozen=True)
class Cosine(ScheduleConfig):
    """Linear warm-up, then half a cosine to ``min_ratio`` of the peak (Loshchilov and Hutter, SGDR, 2017)."""

    name: str = option("cosine")
    min_ratio: float = between(0.1, 0.0, 1.0, _MIN_RATIO)

    def _after_warmup(self, step: int) -> float:
        progress = self._progress(step, self._warmup)
        return self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Linear(ScheduleConfig):
    """Linear warm-up, then a straight line to ``min_ratio`` of the peak."""

    name: str = option("linear")
    min_ratio: float = between(0.1, 0.0, 1.0, _MIN_RATIO)

    def _after_warmup(self, step: int) -> float:
        return 1 - (1 - self.min_ratio) * self._progress(step, self._warmup)


@dataclass(frozen=True)
class Constant(ScheduleConfig):
    """Linear warm-up, then the peak until the end."""

    name: str = option("constant")

    @property
    def _total(self) -> int:
        return self.total_steps or 0  # it only sets the default warm-up

    def _after_warmup(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class WSD(ScheduleConfig):
    """Warm-up, stable, decay (Hu et al., 2024): the last ``decay_steps`` fall linearly to ``min_ratio`` of the peak."""

    name: str = option("wsd")
    decay_steps: int = at_least(40, 0, "Steps of the decay at the end.")
    min_ratio: float = between(0.0, 0.0, 1.0, _MIN_RATIO)

    def _check(self) -> None:
        super()._check()
        if self.total_steps is not None and self._warmup + self.decay_steps > self.total_steps:
            raise ConfigError(
                f"{self._key('warmup_steps')}={self._warmup} + {self._entry('decay_steps')} is more than "
                f"{self._entry('total_steps')}; their sum must be at most {self.total_steps}"
            )

    def _after_warmup(self, step: int) -> float:
        start = self._total - self.decay_steps
        return 1.0 if step < start else 1 - (1 - self.min_ratio) * self._progress(step, start)
