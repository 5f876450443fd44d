"""Descriptions of tasks: plain JSON beside the weights of a model, checked when it is read.

They hold what a trained model needs to be used, and nothing of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from dtrain.errors import CheckpointError, nearest
from dtrain.tasks.classification import Classification
from dtrain.tasks.denoising import Denoising
from dtrain.tasks.regression import Regression
from dtrain.tasks.task import Task

_KINDS: Mapping[str, type[Any]] = {kind.name: kind for kind in (Classification, Regression, Denoising)}
_OF_LOSS = ("label_smoothing",)
_MOST_VALUES = 1 << 28  # of one input, so that a file cannot ask for more memory than there is
_MOST_TIMES = 1 << 20
_LARGEST = 1e300


def describe_task(task: Task) -> dict[str, Any] | None:
    """Returns the description of ``task``; None for a task of language, which a tokenizer describes."""
    if not isinstance(task, (Classification, Regression, Denoising)):
        return None
    values = {name: getattr(task, name) for name in _names(type(task))}
    return {"name": task.name} | {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }


def read_task(values: Any, where: str) -> Task:
    """Returns the task of a description.

    Raises:
        CheckpointError: it is no description of a task; the message names the entry, in ``where``.
    """
    name = values.get("name") if isinstance(values, dict) else None
    if not isinstance(name, str) or name not in _KINDS:
        raise CheckpointError(f"{where}: name is {name!r:.80}, expected one of {', '.join(_KINDS)}")
    names = _names(_KINDS[name])
    for key in values:
        if key != "name" and key not in names:
            raise CheckpointError(f"{where} has the unknown key {key!r:.80}{nearest(key, names)}")
    found: dict[str, Any] = {}
    for key in names:
        check, expected = _CHECKS[key]
        value = values.get(key)
        if not check(value):
            raise CheckpointError(f"{where}: {key} is {value!r:.80}, expected {expected}")
        if isinstance(value, list):
            value = tuple(map(float, value) if check in (_are_numbers, _are_deviations, _are_targets) else value)
        found[key] = value
    task: Task = _KINDS[name](**found)
    if not len(task.input_mean) == len(task.input_std) or len(task.input_mean) not in (0, task.input_shape[0]):
        raise CheckpointError(
            f"{where}: input_mean has {len(task.input_mean)} values and input_std {len(task.input_std)}; expected "
            f"{task.input_shape[0]} of both, one for each index of dimension 0 of {list(task.input_shape)}"
        )
    if task.is_image and (len(task.input_shape) != 3 or not task.input_mean):
        raise CheckpointError(
            f"{where}: images of shape {list(task.input_shape)} with {len(task.input_mean)} means; expected "
            "[channels, height, width] and a mean of each channel"
        )
    if isinstance(task, Regression) and len(task.mean) != len(task.std):
        raise CheckpointError(f"{where}: mean has {len(task.mean)} values and std {len(task.std)}; expected as many")
    return task


def _names(kind: type[Any]) -> list[str]:
    return [item.name for item in fields(kind) if item.name not in _OF_LOSS]


def _is_shape(value: Any) -> bool:
    is_list = isinstance(value, list) and 1 <= len(value) <= 8 and all(type(size) is int for size in value)
    return is_list and min(value) >= 1 and math.prod(value) <= _MOST_VALUES


def _are_numbers(value: Any, *, above: float = -_LARGEST) -> bool:
    return isinstance(value, list) and all(
        isinstance(number, (int, float)) and not isinstance(number, bool) and above < number < _LARGEST
        for number in value
    )


def _are_deviations(value: Any) -> bool:
    return _are_numbers(value, above=0.0)


def _are_targets(value: Any) -> bool:
    return _are_numbers(value) and bool(value)


def _are_labels(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(label, str) for label in value)


def _is_count_of_times(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _MOST_TIMES


_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "labels": (_are_labels, "a list of the names of one class or more"),
    "input_shape": (_is_shape, f"a list of sizes from 1, of at most {_MOST_VALUES} values in all"),
    "input_mean": (_are_numbers, "a list of numbers"),
    "input_std": (_are_deviations, "a list of numbers above 0"),
    "is_image": (lambda value: isinstance(value, bool), "true or false"),
    "mean": (_are_targets, "a list of one number or more"),
    "std": (_are_deviations, "a list of numbers above 0"),
    "num_times": (_is_count_of_times, f"a whole number from 1 to {_MOST_TIMES}"),
}
