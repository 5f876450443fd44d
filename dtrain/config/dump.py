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


def config_to_yaml(config: RunConfig) -> str:
    """The resolved configuration as YAML, every key written out, in the order of the schema."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True, width=120)


def config_hash(config: RunConfig) -> str:
    """SHA-256 (hex) of the canonical JSON of everything that all ranks must agree on.

    Left out are ``run_dir``, ``resume``, ``tracker`` and ``launch`` (device, threads, timeouts): a run that moves to
    another folder or machine, or is resumed, keeps its hash.
    """
    agreed = {key: value for key, value in config_to_dict(config).items() if key not in HASH_EXCLUDES}
    canonical = json.dumps(agreed, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
