"""Fields of the records of settings: default, meaning and permitted values of each in one place, its metadata.

A ``CheckedRecord`` checks itself when it is made, from a command line or in a script; ``config.keys`` reads the
meaning for ``--help`` and the documents.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import types
from collections.abc import Mapping
from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from dtrain.errors import ConfigError, nearest
from dtrain.local_paths import require_local

_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_LONGEST = 80  # characters of a value in a message: a tensor or a model has thousands
_LARGEST = 10**308  # of whole numbers that become a float

Record = TypeVar("Record")


def setting(default: Any, doc: str, **limits: Any) -> Any:
    """A key that takes any value of its type; ``limits`` is for the helpers below.

    ``kind`` replaces an annotation that OmegaConf cannot read, ``what`` describes its values in a message, and
    ``is_path`` marks a path, or a mapping whose keys are paths: URLs are refused, and ``~`` is the home folder.
    """
    metadata = {"doc": doc, **limits}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def one_of(default: str, *others: str | bool, doc: str) -> Any:
    """A key that takes its default or one of ``others``."""
    return setting(default, doc, choices=(default, *others))


def option(name: str) -> Any:
    """The name of the option of a group whose keys the record has. It is fixed, and no positional argument."""
    return field(default=name, kw_only=True, repr=False, metadata={"doc": "", "choices": (name,)})


def at_least(default: Any, minimum: float, doc: str) -> Any:
    return setting(default, doc, min=minimum)


def above(default: Any, bound: float, doc: str, *, maximum: float | None = None) -> Any:
    """A number above ``bound`` and, if given, at most ``maximum``."""
    return setting(default, doc, above=bound, **({} if maximum is None else {"max": maximum}))


def between(default: Any, minimum: float, maximum: float, doc: str) -> Any:
    return setting(default, doc, min=minimum, max=maximum)


def default_of(item: Field[Any]) -> Any:
    """Returns the default of a field that has one."""
    return item.default_factory() if item.default_factory is not MISSING else item.default


def group(kind: type[Any], base: type[Any] | None = None) -> Any:
    """A record of keys inside another; the docstring of ``base``, else its own, documents it up to its sections."""
    doc = re.split(r"\n\n(?:Attributes|Examples):", inspect.getdoc(base or kind) or "")[0]
    return field(default_factory=kind, metadata={"doc": doc})


@dataclass(frozen=True)
class CheckedRecord:
    """Settings that check themselves: the type of each field, its permitted values, then rules between fields.

    Messages name a field ``Class.field``; ``in_keys`` replaces that by a key of the command line.
    """

    def __post_init__(self) -> None:
        for item in fields(self):
            value = check_field(type(self), item.name, getattr(self, item.name), f"{type(self).__name__}.{item.name}")
            object.__setattr__(self, item.name, value)  # as its type: a list for a tuple, a float for an int
        self._check()

    def _check(self) -> None:
        """Raises ``ConfigError`` for values that contradict each other."""

    def _key(self, name: str) -> str:
        return f"{type(self).__name__}.{name}"

    def _entry(self, name: str) -> str:
        return f"{self._key(name)}={getattr(self, name)}"


def in_keys(error: ConfigError, record: type[Any], prefix: str) -> ConfigError:
    """The error of a record with its fields named as keys: ``Native.prefetch`` is ``engine.prefetch``."""
    return ConfigError(re.sub(rf"\b{record.__name__}\.(?=[a-z])", lambda _: prefix, str(error)))


def from_json(kind: type[Record], values: Any, path: str) -> Record:
    """Returns the record ``kind``, whose fields may be records, from the JSON object at ``path``; checks all fields.

    An entry that is no field is ignored.

    Raises:
        ConfigError: names an entry, by its path, that is missing, has another type, or is not permitted.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{path}={shown(values)} is not a mapping {{key: value}}")
    found: dict[str, Any] = {}
    hints: dict[str, Any] = get_type_hints(kind)
    for item in fields(kind):  # type: ignore[arg-type]
        key, hint = f"{path}.{item.name}", hints[item.name]
        if item.name in values:
            value = values[item.name]
            is_record = isinstance(hint, type) and is_dataclass(hint)
            found[item.name] = from_json(hint, value, key) if is_record else check_field(kind, item.name, value, key)
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"{key} is missing")
    try:
        return kind(**found)
    except ConfigError as error:  # of rules between fields
        raise in_keys(error, kind, f"{path}.") from None


def check_field(record: Any, name: str, value: Any, path: str) -> Any:
    """Returns ``value`` as the type of a record's field.

    Args:
        path: the name of the setting for messages.

    Raises:
        ConfigError: it has another type, or is not permitted.
    """
    metadata: Mapping[str, Any] = record.__dataclass_fields__[name].metadata
    choices = metadata.get("choices")
    if choices is not None:  # 1 equals True
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            names = tuple(map(written, choices))
            raise ConfigError(f"{path}={shown(value)} is not one of {', '.join(names)}{similar(value, names)}")
        return value
    kind = metadata.get("kind", _hints(record)[name])
    try:
        value = _as_type(value, kind)
    except TypeError:
        text = repr(value) if isinstance(value, (str, float)) else shown(value)
        raise ConfigError(f"{path}={text} is not {metadata.get('what') or type_name(kind)}") from None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_limits(path, value, metadata)
    if metadata.get("is_path") and value is not None:
        for item in [value] if isinstance(value, str) else value:
            require_local(item, path)
        home = os.path.expanduser
        value = home(value) if isinstance(value, str) else {home(item): of_item for item, of_item in value.items()}
    return value


def _check_limits(path: str, value: float, metadata: Mapping[str, Any]) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}={value} is not a finite number")
    low, bound, high = (metadata.get(name) for name in ("min", "above", "max"))
    if low is not None and not value >= low:
        raise ConfigError(f"{path}={value} is too small; it must be at least {low:g}")
    if bound is not None and not value > bound:
        raise ConfigError(f"{path}={value} is too small; it must be above {bound:g}")
    if high is not None and not value <= high:
        raise ConfigError(f"{path}={value} is too large; it must be at most {high:g}")


@cache
def _hints(record: Any) -> dict[str, Any]:
    return get_type_hints(record)


def _as_type(value: Any, kind: Any) -> Any:
    """Returns ``value`` as ``kind``; raises ``TypeError`` if it is something else. No text is read as a number."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        for other in arguments:
            try:
                return _as_type(value, other)
            except TypeError:
                continue
    elif origin in (list, tuple) and isinstance(value, (list, tuple)):
        return origin(_as_type(item, arguments[0]) for item in value)
    elif origin is dict and isinstance(value, dict):
        return {key: _as_type(item, arguments[1]) for key, item in value.items()}
    elif kind is float and type(value) is int and abs(value) < _LARGEST:
        return float(value)
    elif origin is None and isinstance(value, kind) and not (isinstance(value, bool) and kind in (int, float)):
        return value
    raise TypeError


def type_name(kind: Any) -> str:
    """The values of a type in words, for ``... is not {type_name}``."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join("null" if other is type(None) else type_name(other) for other in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers"
    if get_origin(kind) is list:
        return "a list"
    if get_origin(kind) is dict:
        return "a mapping {key: value}"
    return _TYPE_NAMES.get(kind) or f"a {kind.__name__}"


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


def shown(value: Any) -> str:
    """A value of any type in a message: what ``written`` gives, or the type of an object."""
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__}"
    if not isinstance(value, (str, int, float, list, tuple, dict, types.NoneType)):
        text = str(value)
        is_plain = len(text) <= _LONGEST and "\n" not in text and " at 0x" not in text
        return text if is_plain else f"a {type(value).__module__}.{type(value).__qualname__}"
    text = " ".join(written(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def similar(value: Any, choices: tuple[str, ...]) -> str:
    """``; did you mean 'x'?`` if one of ``choices`` is similar to ``value``, else nothing."""
    hint = nearest(str(value), choices)
    return hint if hint.startswith("; did") else ""
