"""The version of dtrain."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path


def version() -> str:
    """Returns the version of the installed package, or of the checkout."""
    try:
        return metadata.version("dtrain")
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
        return str(tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["version"])
