"""Translates errors of Hydra and OmegaConf into one line about keys and options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigKeyError,
    ConfigTypeError,
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationValidationError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from dtrain.config.commands import PRIMARIES, PROBE, TRAIN, Primary
from dtrain.config.fields import type_name
from dtrain.config.precision import unsupported_format_reason
from dtrain.config.schema import GROUP_OPTIONS
from dtrain.errors import ConfigError, nearest

FREE_GROUPS = ("experiment", "debug")
"""Groups that override others and have no keys of their own."""


def explain(error: Exception, primary: Primary[Any]) -> ConfigError:
    """The one-line ``ConfigError`` for what Hydra or OmegaConf raised while composing ``primary``."""
    if isinstance(error, OverrideParseException):
        return ConfigError(_syntax(error))
    if isinstance(error, MissingConfigException):
        return ConfigError(_missing_config(error))
    cause = _omegaconf_cause(error)
    text = _hydra(error, primary) if cause is None else _omegaconf(error, cause, primary)
    return ConfigError(text + _file_note(str(error)))


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines()]
    kept = [
        line.rstrip(".") for line in lines if line and not line.startswith(("full_key", "object_type", "reference_"))
    ]
    return "; ".join(kept).replace(":; ", ": ")


def _file_note(message: str) -> str:
    """Names the YAML file if Hydra does, except dtrain's primary ones: there the mistake is on the command line."""
    file = re.match(r"In '([^']+)'", message)
    return f" (in {file[1]}.yaml)" if file and file[1] not in {primary.name for primary in PRIMARIES} else ""


def _omegaconf_cause(error: BaseException | None) -> OmegaConfBaseException | None:
    while error is not None and not isinstance(error, OmegaConfBaseException):
        error = error.__cause__ or error.__context__
    return error


def _syntax(error: OverrideParseException) -> str:
    noise = ("Error parsing override", "LexerNoViableAlt", "See https", "^")
    reasons = [line for line in error.message.splitlines() if line.strip() and not line.strip().startswith(noise)]
    reason = f" ({reasons[0]})" if reasons else ""
    return f"cannot read '{error.override}'{reason}; write key=value, and quote values with special characters"


def _missing_config(error: MissingConfigException) -> str:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    if not group:
        return _one_line(str(error).partition("\nSearch path")[0].partition("\nConfig search path")[0])
    if group == "precision" and (reason := unsupported_format_reason(option)):
        return f"precision={option}: {reason}{_file_note(str(error))}"
    choices = [f"{group}={name}" for name in error.options or ()]
    return f"unknown option '{group}={option}'{nearest(f'{group}={option}', choices)}{_file_note(str(error))}"


def _hydra(error: Exception, primary: Primary[Any]) -> str:
    there = re.match(r"Could not append to config. An item is already at '([^']+)'", str(error))
    if there:
        return f"'{there[1]}' exists already; write it without '+'"
    absent = re.match(r"Could not delete from config. '([^']+)' does not exist", str(error))
    if absent:
        return unknown_key(absent[1], primary.schema, primary)
    message = re.sub(r"^In '[^']+': ", "", str(error))
    unmatched = re.match(r"Could not override '([^'@]+)'\. No match in the defaults list", message)
    if unmatched:
        groups = [item.name for item in fields(primary.schema)]
        if unmatched[1] == "precision" and primary is PROBE:
            return "dtrain probe tries every precision of formats=[...]; 'precision' has only the keys below it"
        return f"no group '{unmatched[1]}' to override{nearest(unmatched[1], groups)}"
    return _one_line(message)


def _omegaconf(error: Exception, cause: OmegaConfBaseException, primary: Primary[Any]) -> str:
    key = cause.full_key or str(cause.key)
    if isinstance(cause, MissingMandatoryValue):
        hint = f"choose {key}={'|'.join(GROUP_OPTIONS[key])}" if key in GROUP_OPTIONS else f"give {key}=VALUE"
        return f"'{key}' is required; {hint}"
    if isinstance(cause, InterpolationKeyError):
        wanted = re.search(r"Interpolation key '([^']+)'", str(cause))
        name = wanted[1] if wanted else key
        return f"{key}={_interpolation(cause)}: '{name}' is not a key{_suggest(name, set(_keys(primary.schema)))}"
    if isinstance(cause, InterpolationValidationError):
        return f"{key}={_interpolation(cause)} gives {cause.value}, which is not {type_name(_expected_type(cause))}"
    if isinstance(cause, InterpolationResolutionError):
        return f"{key}={_interpolation(cause)} cannot be resolved: {_reason(cause)}"
    if isinstance(cause, ConfigTypeError) and "ListConfig" in str(cause):
        return f"'{key}' is {type_name(dict[str, str])}, not a list"
    if isinstance(cause, ConfigTypeError):
        return f"'{key}' cannot be removed: every key of the schema has a value"
    # OmegaConf names only the part of the key that failed; Hydra's message has the whole key
    overridden = re.match(r"(?:Could not override '|Error merging override \+*)([\w.]+)", str(error))
    whole = overridden[1] if overridden else key
    if isinstance(cause, ValidationError) and not whole.startswith(f"{key}."):
        return _wrong_type(cause, key)
    if isinstance(cause, (ConfigKeyError, AttributeError, ValidationError)):
        if whole in _keys(primary.schema) and whole.rpartition(".")[2] != cause.key:  # a mapping with the key inside
            whole = f"{whole}.{cause.key}"
        return unknown_key(whole, cause.object_type, primary)
    return f"{key}: {_one_line(str(cause))}"


def _interpolation(cause: OmegaConfBaseException) -> Any:
    """The value as the user wrote it, unresolved."""
    node = cause.parent_node._get_node(cause.key, validate_access=False)
    return node._value()


def _reason(cause: Exception) -> str:
    text = _one_line(str(cause))
    raised = re.fullmatch(r"\w+ raised while resolving interpolation: (.*)", text)
    return (raised[1] if raised else text).strip('"')


def _wrong_type(cause: OmegaConfBaseException, key: str) -> str:
    hint = _expected_type(cause)
    value = "null" if cause.value is None else cause.value
    if is_dataclass(hint):
        return f"{key}={value}: '{key}' is a group of keys; set one of {', '.join(_keys(hint, f'{key}.'))}"
    return f"{key}={value} is not {type_name(hint)}" if hint else f"{key}: {_one_line(str(cause))}"


def _expected_type(cause: OmegaConfBaseException) -> Any:
    if is_dataclass(cause.object_type):
        return get_type_hints(cause.object_type).get(str(cause.key))
    arguments = get_args(cause.ref_type)  # an element of a list or tuple
    return arguments[-1] if arguments else None


def unknown_key(key: str, schema: Any, primary: Primary[Any]) -> str:
    """Message for ``key``, which does not exist in ``schema``, a record of ``primary``."""
    group = key.partition(".")[0]
    options = GROUP_OPTIONS.get(group, {})
    chosen = next((option for option, kind in options.items() if kind is schema), None)
    if chosen is None:
        free = FREE_GROUPS if primary is TRAIN else ()
        return f"unknown key '{key}'{_suggest(key, {*_keys(primary.schema), *free})}"
    own = list(_keys(schema, f"{group}."))
    owners = [option for option, kind in options.items() if key in _keys(kind, f"{group}.")]
    if owners:
        return (
            f"unknown key '{key}' with {group}={chosen}; it belongs to {group}={'|'.join(owners)}; "
            f"valid: {', '.join(sorted(own))}"
        )
    return f"unknown key '{key}' with {group}={chosen}{_suggest(key, set(own))}"


def _keys(schema: Any, prefix: str = "") -> Iterator[str]:
    """Yields every full key of a record, with those of all options of a group."""
    hints = get_type_hints(schema)
    for item in fields(schema):
        path, kind = f"{prefix}{item.name}", hints[item.name]
        yield path
        for option in GROUP_OPTIONS.get(path, {"": kind}).values():
            if is_dataclass(option):
                yield from _keys(option, f"{path}.")


def _suggest(key: str, valid: set[str]) -> str:
    """Suggests the only key with the same last part, else the nearest key, else lists the valid keys of the group."""
    parent, _, name = key.rpartition(".")
    prefixes = [key[: found.start()] for found in re.finditer(r"\.", key)]
    for prefix in prefixes:
        if prefix in valid and not any(other.startswith(f"{prefix}.") for other in valid):
            return f"; did you mean '{prefix}'?"  # a key with a value, not a group of keys
    same_name = [other for other in valid if other.rpartition(".")[2] == name]
    if len(same_name) == 1:
        return f"; did you mean '{same_name[0]}'?"
    hint = nearest(key, [other for other in valid if not key.startswith(f"{other}.")])
    if hint.startswith("; did"):
        return hint
    siblings = [other for other in valid if other.rpartition(".")[0] == parent]
    return nearest(key, siblings or [other for other in valid if "." not in other])
