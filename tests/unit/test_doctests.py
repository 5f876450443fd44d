"""The examples in the docstrings that docs/reference/api.md shows print what they say."""

from __future__ import annotations

import doctest
import inspect
import re
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import dtrain

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"
NAMES = re.findall(r"^::: ([\w.]+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
LEAST = 26
"""Docstrings whose examples must be found, so that a change of the search cannot leave them out silently."""


def resolved(name: str) -> Any:
    """Returns the module, class or function ``name``."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        home, _, last = name.rpartition(".")
        return getattr(import_module(home), last)


def documented() -> Iterator[tuple[str, Any]]:
    """Yields each class and function of the page; of a class also what it inherits from in dtrain."""
    for name in NAMES:
        value = resolved(name)
        if isinstance(value, ModuleType):
            own = [key for key, item in vars(value).items() if getattr(item, "__module__", None) == value.__name__]
            yield from ((f"{name}.{key}", getattr(value, key)) for key in getattr(value, "__all__", own))
        elif inspect.isclass(value):
            bases = [base for base in value.__mro__[1:] if base.__module__.startswith("dtrain.")]
            yield from ((name, value), *((base.__qualname__, base) for base in bases))
        else:
            yield name, value


def found() -> dict[str, doctest.DocTest]:
    """Returns the docstrings with examples by name, for a reader who has imported dtrain, tempfile and torch."""
    finder, tests = doctest.DocTestFinder(), {}
    for name, value in dict(documented()).items():
        globs = {"dtrain": dtrain, "tempfile": tempfile, "torch": torch}
        home = import_module(value.__module__)
        tests |= {test.name: test for test in finder.find(value, name, module=home, globs=globs) if test.examples}
    return tests


def test_the_page_names_the_public_api() -> None:
    assert {f"dtrain.{name}" for name in dtrain.__all__} <= {*NAMES}


def test_the_examples_print_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    # one test, because finding them imports accelerate and transformers, which collecting tests should not
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the examples' inputs are on the CPU
    tests = found()
    assert len(tests) >= LEAST, sorted(tests)
    assert {"dtrain.initialize", "dtrain.Engine.save", "TrainingLoop.step", "dtrain.checkpoint.verify"} <= tests.keys()
    report: list[str] = []
    results = [doctest.DocTestRunner().run(test, out=report.append) for test in tests.values()]
    assert all(result.attempted for result in results)
    assert not report, "".join(report)
