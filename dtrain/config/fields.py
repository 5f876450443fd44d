"""Fields of the configuration records: default, meaning and permitted values of a key in one place, its metadata.

``check_fields`` enforces the permitted values; ``config.keys`` reads the meaning for ``--help`` and the documents.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from copy import copy
from dataclasses import field, fields, is_dataclass
from typing import Any

from dtrain.errors import ConfigError, nearest


def setting(default: Any, doc: str, **limits: Any) -> Any:
    """A key that takes any value of its type; ``limits`` is for the helpers below."""
    metadata = {"doc": doc, **limits}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def one_of(default: str, *others: str | bool, doc: str) -> Any:
    """A key that takes its default or one of ``others``."""
    return setting(default, doc, choices=(default, *others))


def at_least(default: Any, minimum: float, doc: str) -> Any:
    return setting(default, doc, min=minimum)


def above(default: Any, bound: float, doc: str, *, maximum: float | None = None) -> Any:
    """A number above ``bound`` and, if given, at most ``maximum``."""
    return setting(default, doc, above=bound, **({} if maximum is None else {"max": maximum}))


def between(default: Any, minimum: float, maximum: float, doc: str) -> Any:
    return setting(default, doc, min=minimum, max=maximum)


def group(kind: type[Any], doc: str = "") -> Any:
    """A record of keys inside another; its docstring documents it unless ``doc`` does."""
    return field(default_factory=kind, metadata={"doc": doc or inspect.getdoc(kind)})


def check_fields(config: Any, prefix: str = "") -> None:
    """Checks every value of ``config`` and of the records inside it against its field's metadata.

    Raises:
        ConfigError: naming the first key at fault, its value and the permitted values.
    """
    for path, value, metadata in _values(config, prefix):
        choices = metadata.get("choices")
        if choices is not None and value not in choices:
            names = tuple(map(written, choices))
            raise ConfigError(f"{path}={value} is not one of {', '.join(names)}{similar(value, names)}")
        if value is None or isinstance(value, (str, bool)):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{path}={value} is not a finite number")
        low, high = metadata.get("min"), metadata.get("max")
        if low is not None and not value >= low:
            raise ConfigError(f"{path}={value} is too small; it must be at least {low:g}")
        bound = metadata.get("above")
        if bound is not None and not value > bound:
            raise ConfigError(f"{path}={value} is too small; it must be above {bound:g}")
        if high is not None and not value <= high:
            raise ConfigError(f"{path}={value} is too large; it must be at most {high:g}")


def written(value: Any) -> str:
    """A value as the command line takes it: ``null``, ``true``, ``[0.9,0.95]``, ``1e-05``."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}: {written(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else str(value).removesuffix(".0")
    return str(value)


def similar(value: Any, choices: tuple[str, ...]) -> str:
    """``; did you mean 'x'?`` if one of ``choices`` is similar to ``value``, else nothing."""
    hint = nearest(str(value), choices)
    return hint if hint.startswith("; did") else ""


def _values(config: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for item in fields(config):
        path = f"{prefix}{item.name}"
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from _values(value, f"{path}.")
        else:
            yield path, value, item.metadata
