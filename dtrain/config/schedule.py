"""Learning-rate schedules: pure functions of the number of applied steps.

A skipped step does not advance them, so the schedule and Adam's bias correction stay in line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from dtrain.config.fields import CheckedRecord, at_least, between, option, shown
from dtrain.errors import ConfigError


class AnySchedule(Protocol):
    """A learning-rate schedule: a frozen record, so that ranks can compare it."""

    def factor(self, step: int) -> float:
        """Returns the learning rate of the update after ``step`` applied ones, as a fraction of the peak."""


_REQUIRED = (0, 1, 2)
_SAMPLED = (*_REQUIRED, 10, 100, 1000)


class _HoldsFunction:
    """Base of a record with an attribute that is no field of it, so that ranks do not compare it."""

    _function: Callable[[int], float]


@dataclass(frozen=True, init=False, repr=False)
class Schedule(_HoldsFunction):
    """Learning rate by a function of the number of applied steps, as a fraction of the peak.

    Ranks compare a few of its values when they start, and the learning rate itself at every step.

    Args:
        function: takes the number of applied steps and returns a finite number >= 0, always the same for a step.

    Attributes:
        samples: its values at a few steps; None at a step that it does not take, such as one after the end of a table.

    Raises:
        ConfigError: it fails or returns something else at one of the first steps.
    """

    samples: tuple[float | None, ...]

    def __init__(self, function: Callable[[int], float]) -> None:
        if isinstance(function, type) or not callable(function):
            raise ConfigError(
                f"Schedule({shown(function)}) needs a function of the number of applied steps, such as "
                f"dtrain.Schedule(lambda step: 1 / (step + 1) ** 0.5)"
            )
        object.__setattr__(self, "_function", function)
        object.__setattr__(self, "samples", tuple(self._sample(step) for step in _SAMPLED))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._function!r})"

    def factor(self, step: int) -> float:
        """Returns the function's value at ``step``; raises ``ConfigError`` if it is no finite number >= 0."""
        try:
            value = self._function(step)
            factor = float(value)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the schedule's function fails at step {step}: {type(error).__name__}: {error}"
            ) from error
        if not 0.0 <= factor < math.inf:
            raise ConfigError(
                f"the schedule's function returns {shown(value)} at step {step}; expected a finite number >= 0, the "
                f"fraction of the peak learning rate"
            )
        return factor

    def _sample(self, step: int) -> float | None:
        try:
            return self.factor(step)
        except ConfigError:
            if step in _REQUIRED:
                raise
            return None


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
    """Linear warm-up, then half a cosine to ``min_ratio`` of the peak (Loshchilov and Hutter, SGDR, 2017).

    Examples:
        >>> [round(1e-3 * dtrain.Cosine(warmup_steps=2, total_steps=10).factor(n), 6) for n in (0, 1, 2, 6, 10)]
        [0.0005, 0.001, 0.001, 0.00055, 0.0001]
    """

    name: str = option("cosine")
    min_ratio: float = between(0.1, 0.0, 1.0, _MIN_RATIO)

    def _after_warmup(self, step: int) -> float:
        progress = self._progress(step, self._warmup)
        return self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Linear(ScheduleConfig):
    """Linear warm-up, then a straight line to ``min_ratio`` of the peak.

    Examples:
        >>> [round(1e-3 * dtrain.Linear(warmup_steps=2, total_steps=10).factor(n), 6) for n in (0, 1, 2, 6, 10)]
        [0.0005, 0.001, 0.001, 0.00055, 0.0001]
    """

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
    """Warm-up, stable, decay (Hu et al., 2024): the last ``decay_steps`` fall linearly to ``min_ratio`` of the peak.

    Examples:
        >>> schedule = dtrain.WSD(warmup_steps=2, total_steps=10, decay_steps=4)
        >>> [round(1e-3 * schedule.factor(n), 6) for n in (0, 1, 6, 8, 10)]
        [0.0005, 0.001, 0.001, 0.0005, 0.0]
    """

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
