"""Checks of what a caller passes to the methods of an engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from dtrain.checkpoint import Retention
from dtrain.errors import UsageError
from dtrain.local_paths import local_path

Item = TypeVar("Item")


def is_number(value: Any) -> bool:
    """Whether ``value`` is a real number, of Python, NumPy or a tensor of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def iterated(batch: Iterable[Item]) -> Iterator[Item]:
    """Returns an iterator over the micro-batches of ``batch``.

    Raises:
        UsageError: ``batch`` is no iterable, or one whose items are not micro-batches (keys, characters).
    """
    try:
        items = None if isinstance(batch, Mapping | str | bytes) else iter(batch)
    except TypeError:
        items = None
    if items is None:
        raise UsageError(
            f"engine.accumulate got a {type(batch).__name__}; expected a list or another iterable of this rank's "
            f"micro-batches, such as [micro_batch]"
        )
    return items


def checked_path(verb: str, path: Any) -> Path:
    """Returns the argument of ``engine.save`` or ``engine.load`` as a path, or raises ``UsageError``."""
    try:
        return local_path(path, f"engine.{verb}(path)")
    except TypeError:
        raise UsageError(f"engine.{verb}({path!r}): expected a directory as a string or a Path") from None


def checked_lr(lr: Any, step: int) -> float:
    """Returns the learning rate of ``step`` as a Python number, or raises ``UsageError``."""
    if not is_number(lr) or not 0 <= lr < math.inf:
        raise UsageError(f"the learning rate of step {step} is {lr!r}; expected a finite number >= 0")
    return float(lr)


def checked_max_grad_norm(given: Any, default: float | None) -> float:
    """Returns the clipping threshold of a step, infinite for no clipping, or raises ``UsageError``.

    Args:
        given: that of ``engine.step``; None: the default.
        default: that of ``initialize``; None: no clipping.
    """
    if given is None:
        return math.inf if default is None else default
    if not is_number(given) or not given > 0:
        raise UsageError(
            f"engine.step(max_grad_norm={given!r}): expected a number above 0, math.inf for no clipping, or None for "
            f"the threshold of dtrain.initialize"
        )
    return float(given)


def checked_grad_factor(given: Any) -> float:
    """Returns the factor of a step's gradient as a Python number, or raises ``UsageError``."""
    if not is_number(given) or not 0 < given < math.inf:
        raise UsageError(f"engine.step(grad_factor={given!r}): expected a finite number above 0")
    return float(given)


def check_save_options(options: Mapping[str, Any]) -> None:
    """Raises ``UsageError`` for an option of ``engine.save`` of another type than its documented one."""
    expected = {
        "extra": (Mapping, "a mapping of JSON values"),
        "config": (Mapping, "a mapping of JSON values"),
        "metrics": (Mapping, "a mapping of names to numbers or None"),
        "retention": (Retention, "a dtrain.checkpoint.Retention"),
        "asynchronous": (bool, "True or False"),
    }
    for name, value in options.items():
        kind, words = expected.get(name, (object, ""))
        is_absent = value is None and kind is not bool
        if not is_absent and not isinstance(value, kind):
            raise UsageError(f"engine.save({name}={value!r}): expected {words}")


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of ``engine.save`` that are finite numbers.

    Raises:
        UsageError: a value is neither a number nor None.
    """
    for name, value in metrics.items():
        if value is not None and not is_number(value):
            raise UsageError(f"engine.save(metrics={{{name!r}: {value!r}}}): expected a number or None")
    return {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}
