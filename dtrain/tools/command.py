"""The command line of a report, without secrets."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from dtrain.redaction.redact import MASK, has_secret_name, is_secret, redact_text


def command_text(verb: str, argv: Sequence[str]) -> str:
    """Returns ``dtrain verb key=value ...`` for a shell, with ``***`` for the values that a run's config blanks."""
    return shlex.join(["dtrain", verb, *map(_redacted, argv)])


def _redacted(word: str) -> str:
    key, equals, value = word.partition("=")
    names = key.lstrip("+~").split(".")
    # a mapping or a list is blanked as a whole: its values may have spaces and need no quotes
    if equals and (
        any(is_secret(name, _scalar(value)) for name in names) or (value[:1] in ("{", "[") and has_secret_name(value))
    ):
        return f"{key}={MASK}"
    return redact_text(word)


def _scalar(value: str) -> float | str | None:
    """Returns the value as its secrecy sees it: a number, null for what is none, or text."""
    if value.lower() in ("true", "false", "null"):
        return None
    try:
        return float(value)
    except ValueError:
        return value
