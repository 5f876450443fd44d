"""The command line of a report, without secrets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

import yaml

from dtrain.checkpoint.snapshot import redact

_NAME = re.compile(r"([\w-]+)['\"]?\s*:")  # of an entry of a mapping


def command_text(verb: str, argv: Sequence[str]) -> str:
    """Returns ``dtrain verb key=value ...`` for a shell, with ``***`` for the values that a run's config blanks."""
    return shlex.join(["dtrain", verb, *map(_redacted, argv)])


def _redacted(word: str) -> str:
    key, equals, value = word.partition("=")
    if not equals:
        return str(redact(word))
    names = key.lstrip("+~").split(".")
    if value[:1] in ("{", "["):  # blanked as a whole
        is_secret = any(redact("", name) for name in (*names, *_NAME.findall(value)))
    else:
        is_secret = any(redact(_scalar(value), name) == "***" for name in names)
    return f"{key}=***" if is_secret else f"{key}={redact(value)}"


def _scalar(value: str) -> object:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value
