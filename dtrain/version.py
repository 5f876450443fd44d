"""The versions of dtrain and of other packages."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path


def version() -> str:
    """Returns the version of the installed package, or of the checkout."""
    if (found := package_version("dtrain")) is not None:
        return found
    pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"  # a checkout that is not installed
    return str(tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["version"])


def package_version(name: str) -> str | None:
    """Returns the version of a package, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
