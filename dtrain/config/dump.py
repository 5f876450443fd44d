"""A resolved configuration as plain data: for ``config.yaml``, for the manifest, and as a hash that ranks compare."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from dtrain.config.schema import RunConfig

HASH_EXCLUDES = ("run_dir", "resume", "tracker", "launch")
"""Keys outside :func:`config_hash`: they say where a run lives and who watches it, not what it computes."""


def config_to_dict(config: Any) -> dict[str, Any]:
    """The record as nested dicts and lists in the order of the schema; tuples become lists."""
    return {item.name: _plain(getattr(config, item.name)) for item in fields(config)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return config_to_dict(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def to_yaml(values: dict[str, Any]) -> str:
    """What :func:`config_to_dict` gave as YAML, every key written out, in the order of the schema."""
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)


def agreed(config: RunConfig) -> dict[str, Any]:
    """What all ranks must agree on: the config without ``HASH_EXCLUDES``."""
    return {key: value for key, value in config_to_dict(config).items() if key not in HASH_EXCLUDES}


def config_hash(config: RunConfig) -> str:
    """SHA-256 (hex) of the canonical JSON of :func:`agreed`.

    Left out are ``run_dir``, ``resume``, ``tracker`` and ``launch`` (device, threads, timeouts): a run that moves to
    another folder or machine, or is resumed, keeps its hash.
    """
    canonical = json.dumps(agreed(config), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
