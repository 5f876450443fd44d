"""Learning rates by a scheduler of torch."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from dtrain.config.fields import shown
from dtrain.config.schedule import Schedule
from dtrain.errors import ConfigError

_KEPT = ("betas", "eps", "weight_decay")
"""Hyper-parameters of the optimizer below that no scheduler may change."""


class _HoldsScheduler:
    """Attributes that are no fields, so that ranks do not compare them."""

    _scheduler: Callable[..., LRScheduler]
    _options: dict[str, Any]
    _replay: _Replay | None


@dataclass(frozen=True, init=False, repr=False)
class TorchSchedule(Schedule, _HoldsScheduler):
    """Learning rate by a scheduler of torch, which advances with each applied step.

    The scheduler works on an optimizer without parameters of the model, so a skipped step does not advance it, and a
    resumed run replays it.

    Args:
        scheduler: a class, such as ``torch.optim.lr_scheduler.OneCycleLR``, or a function that takes an optimizer and
            returns a scheduler.
        **options: the class's options, such as ``max_lr=1e-3, total_steps=1000``.

    Attributes:
        base_lr: learning rate of the optimizer that the scheduler works on; ``dtrain.initialize`` sets the run's.

    Raises:
        ConfigError: the scheduler refuses its options, needs metrics, or changes more than the learning rate.

    Examples:
        >>> schedule = dtrain.TorchSchedule(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.1)
        >>> [round(1e-3 * schedule.factor(n), 6) for n in (0, 1, 2, 4)]
        [0.001, 0.001, 0.0001, 1e-05]
    """

    base_lr: float

    def __init__(self, scheduler: Callable[..., LRScheduler], **options: Any) -> None:
        if not callable(scheduler) or isinstance(scheduler, LRScheduler):
            raise ConfigError(
                f"TorchSchedule({shown(scheduler)}) takes a class and its options, such as dtrain.TorchSchedule("
                f"torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000), or a function that makes a scheduler of an "
                f"optimizer"
            )
        self._set(scheduler, options, 1.0)

    def with_base_lr(self, base_lr: float) -> TorchSchedule:
        """Returns the same schedule for an optimizer with the learning rate ``base_lr``, above 0."""
        if not base_lr > 0:
            raise ConfigError(f"TorchSchedule needs an optimizer with lr above 0, and got lr={base_lr:g}")
        other = object.__new__(TorchSchedule)
        other._set(self._scheduler, self._options, base_lr)
        return other

    def _set(self, scheduler: Callable[..., LRScheduler], options: dict[str, Any], base_lr: float) -> None:
        for name, value in {"_scheduler": scheduler, "_options": options, "base_lr": base_lr, "_replay": None}.items():
            object.__setattr__(self, name, value)
        super().__init__(self._fraction)

    def __repr__(self) -> str:
        options = "".join(f", {key}={value!r}" for key, value in self._options.items())
        return f"TorchSchedule({self._scheduler!r}{options})"

    def _fraction(self, step: int) -> float:
        replay = self._replay
        if replay is None or replay.step > step:
            replay = _Replay(self._scheduler, self._options, self.base_lr)
        object.__setattr__(self, "_replay", None)  # a scheduler that fails is not used again
        replay.advance(step)
        object.__setattr__(self, "_replay", replay)
        return replay.lr / self.base_lr


class _Replay:
    """A scheduler on an optimizer without gradients."""

    def __init__(self, scheduler: Callable[..., LRScheduler], options: dict[str, Any], lr: float) -> None:
        self.step = 0
        self._optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=lr)
        group = self._optimizer.param_groups[0]
        self._kept = {name: group[name] for name in _KEPT}
        self._scheduler = self._build(scheduler, options)
        self._require_kept()
        self._optimizer.step()  # does nothing; without it torch warns about the order of calls

    @property
    def lr(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def advance(self, step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # nested schedulers warn about their own calls
            while self.step < step:
                self._scheduler.step()
                self.step += 1
        self._require_kept()

    def _build(self, scheduler: Callable[..., LRScheduler], options: dict[str, Any]) -> LRScheduler:
        name = getattr(scheduler, "__name__", "the scheduler")
        try:
            built = scheduler(self._optimizer, **options)
        except Exception as error:
            raise ConfigError(f"TorchSchedule: {name} cannot be built: {type(error).__name__}: {error}") from error
        if not isinstance(built, LRScheduler) or getattr(built, "optimizer", None) is not self._optimizer:
            raise ConfigError(
                f"TorchSchedule: {name} returned {shown(built)}; expected a scheduler of torch for the optimizer that "
                f"it was given"
            )
        needed = [
            key
            for key, parameter in inspect.signature(built.step).parameters.items()
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        if needed:
            raise ConfigError(
                f"TorchSchedule: the step of {type(built).__name__} needs {', '.join(needed)}, which an engine does "
                f"not have. Drive it yourself, over an optimizer of your own: outcome = engine.step(lr="
                f"scheduler.get_last_lr()[0]), and after it: if outcome.applied: scheduler.step({', '.join(needed)})"
            )
        return built

    def _require_kept(self) -> None:
        group = self._optimizer.param_groups[0]
        changed = [name for name, value in self._kept.items() if group[name] != value]
        if changed:
            raise ConfigError(
                f"TorchSchedule: {type(self._scheduler).__name__} also changes {', '.join(changed)}, and an optimizer "
                f"of dtrain keeps its own: give cycle_momentum=False, or a scheduler of the learning rate alone"
            )
