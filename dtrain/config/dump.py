"""Converts a resolved configuration to plain data (``config.yaml``, manifests) and to the hash that ranks compare."""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from dtrain.config.fields import default_of
from dtrain.config.schema import GROUP_OPTIONS, RunConfig

Record = TypeVar("Record")

HASH_EXCLUDES = ("run_dir", "resume", "report", "tracker", "launch", "supervise")
"""Keys outside ``config_hash``: where a run is stored, started, tracked and shown, not what it computes."""


def config_to_dict(config: Any) -> dict[str, Any]:
    """The record as nested dicts and lists in the order of the schema; tuples become lists."""
    return {item.name: _plain(getattr(config, item.name)) for item in fields(config)}


def defaults(kind: Any) -> dict[str, Any]:
    """The defaults of the record ``kind`` as ``config_to_dict``, also if some must be given to make one."""
    return {item.name: _plain(default_of(item)) for item in fields(kind)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return config_to_dict(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}  # JSON has no other keys
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def config_from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Inverse of ``config_to_dict``."""
    chosen = {name: from_plain(kinds[values[name]["name"]], values[name]) for name, kinds in GROUP_OPTIONS.items()}
    return replace(from_plain(RunConfig, {key: values[key] for key in values if key not in chosen}), **chosen)


def from_plain(kind: type[Record], values: Mapping[str, Any]) -> Record:
    """Returns the record of dataclass ``kind`` from the plain data of ``dataclasses.asdict`` or JSON.

    Raises:
        KeyError: a field without default is missing.
        TypeError: an unknown field.
    """
    hints = get_type_hints(kind)
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise TypeError(f"unexpected field '{name}'")
    required = [name for name, item in known.items() if item.default is MISSING and item.default_factory is MISSING]
    return kind(**{name: _convert(hints[name], values[name]) for name in [*required, *values]})


def _convert(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    if is_dataclass(hint):
        return from_plain(hint, value)  # type: ignore[arg-type]
    if get_origin(hint) is list:
        return [_convert(get_args(hint)[0], item) for item in value]
    if get_origin(hint) is tuple:
        return tuple(value)
    return value


def to_yaml(values: dict[str, Any]) -> str:
    """Returns the result of ``config_to_dict`` as YAML, every key written out, in the order of the schema."""
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)


def agreed(config: RunConfig) -> dict[str, Any]:
    """The part of the config on which all ranks must agree: all but ``HASH_EXCLUDES``."""
    return {key: value for key, value in config_to_dict(config).items() if key not in HASH_EXCLUDES}


def config_hash(config: RunConfig) -> str:
    """SHA-256 (hex) of the canonical JSON of ``agreed``.

    A run that moves to another folder or machine, or is resumed, keeps its hash.
    """
    canonical = json.dumps(agreed(config), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
