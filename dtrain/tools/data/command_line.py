"""Reads ``key=value`` arguments by a table of options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.errors import ConfigError, nearest

REQUIRED = object()
_SWITCHES = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


@dataclass(frozen=True)
class Option:
    """A key of a command.

    Attributes:
        read: returns the value of a text, or raises ValueError with what is expected.
        default: ``REQUIRED`` if there is none.
        shown: the default in the help, if its value says too little.
    """

    key: str
    read: Callable[[str], Any]
    default: Any
    meaning: str
    shown: str | None = None


@dataclass(frozen=True)
class Command:
    """A command of ``dtrain data``.

    Attributes:
        meaning: one line.
        example: its arguments.
        run: module and function, ``package.module:function``, which takes the values by key and returns the exit code.
        options: its keys.
        folder: whether a folder comes before the keys; its key is ``folder``.
    """

    meaning: str
    example: str
    run: str
    options: tuple[Option, ...]
    folder: bool = False


def read_path(text: str) -> Path:
    if not text:
        raise ValueError("a path")
    return Path(text).expanduser()


def read_text(text: str) -> str:
    if not text:
        raise ValueError("text")
    return text


def read_switch(text: str) -> bool:
    if text.lower() not in _SWITCHES:
        raise ValueError("true or false")
    return _SWITCHES[text.lower()]


def read_count(text: str) -> int:
    """Returns a whole number from 1, such as 8192 or 8_192."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError("a whole number from 1")
    return number


def read_arguments(name: str, command: Command, argv: Sequence[str]) -> dict[str, Any]:
    """Returns the value of each key of ``command``.

    Raises:
        ConfigError: an unknown, repeated, missing or invalid key.
    """
    values: dict[str, Any] = {}
    keys = {option.key: option for option in command.options}
    words = list(argv)
    if command.folder:
        if not words or "=" in words[0]:
            raise ConfigError(f"dtrain data {name} takes a folder: dtrain data {name} {command.example}")
        values["folder"] = read_path(words.pop(0))
    for word in words:
        key, equals, text = word.partition("=")
        key = key.removeprefix("--")
        if not equals:
            raise ConfigError(f"dtrain data {name} cannot read '{word}'; expected key=value{_listed(keys)}")
        if key not in keys:
            raise ConfigError(f"dtrain data {name} has no key '{key}'{nearest(key, keys) or '; it takes none'}")
        if key in values:
            raise ConfigError(f"dtrain data {name}: {key} is given twice; quote a glob: files='corpus/**/*.jsonl'")
        try:
            values[key] = keys[key].read(text)
        except ValueError as error:
            raise ConfigError(f"dtrain data {name}: {key}={text}; expected {error}") from None
    missing = [option.key for option in command.options if option.default is REQUIRED and option.key not in values]
    if missing:
        raise ConfigError(
            f"dtrain data {name} needs {' and '.join(f'{key}=...' for key in missing)}, such as dtrain data {name} "
            f"{command.example}"
        )
    return {option.key: option.default for option in command.options} | values


def _listed(keys: dict[str, Option]) -> str:
    return f", with the keys {', '.join(keys)}" if keys else ""


def command_help(name: str, command: Command) -> str:
    """Returns what ``dtrain data NAME --help`` prints."""
    place = " DIR" if command.folder else ""
    lines = [f"usage: dtrain data {name}{place} key=value ...", "", command.meaning, ""]
    width = max((len(option.key) for option in command.options), default=0)
    for option in command.options:
        shown = option.default if option.shown is None else option.shown
        state = "required" if option.default is REQUIRED else f"default {_text(shown)}"
        lines.append(f"  {option.key:{width}}  {option.meaning} ({state})")
    return "\n".join([*lines, *[""] * bool(command.options), f"example: dtrain data {name} {command.example}"])


def _text(value: Any) -> str:
    return {None: "none", True: "true", False: "false"}.get(value, str(value))
