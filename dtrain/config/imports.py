"""Objects that the user names as text: ``package.module:name``, on a command line or in a file of their own."""

from __future__ import annotations

import importlib
import os
import re
import sys
from types import ModuleType
from typing import Any

from dtrain.errors import ConfigError, nearest

NAMED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""The form of such a text."""


class NamedClass(str):
    """``module:name`` of a class, which holds the class too: one of a script or of a function cannot be imported."""

    def __new__(cls, named: str | type) -> NamedClass:
        text = f"{named.__module__}:{named.__qualname__}" if isinstance(named, type) else named
        self = super().__new__(cls, text)
        if isinstance(named, type):
            self.loaded = named
        return self

    loaded: type


def load_named(text: str, key: str) -> Any:
    """Imports what ``text`` names; its module may be in the working directory.

    It runs code, so the text may only come from the user's own command line or configuration, never from a checkpoint.

    Args:
        text: of the form ``NAMED``.
        key: the setting that holds the text, for messages.

    Raises:
        ConfigError: the module cannot be imported, or does not have the name.
    """
    module_name, _, name = text.partition(":")
    module = _import(module_name, f"{key}={text}")
    found = getattr(module, name, None)
    if found is None:
        known = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
        raise ConfigError(f"{key}={text}: module {module_name} has no {name}{nearest(name, known)}")
    return found


def _import(module_name: str, entry: str) -> ModuleType:
    if not module_name.startswith(("dtrain.", "torch.")):
        # `python -m` adds the working directory, a console script does not. It stays on the path for later imports
        cwd = os.getcwd()
        if cwd not in sys.path and "" not in sys.path:
            sys.path.insert(0, cwd)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{entry}: no module named {error.name} on the Python path or in {os.getcwd()}"
            ) from error
        raise ConfigError(f"{entry}: importing {module_name} failed: {error}") from error
    except Exception as error:
        raise ConfigError(f"{entry}: importing {module_name} failed: {type(error).__name__}: {error}") from error
