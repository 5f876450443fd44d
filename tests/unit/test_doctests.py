"""The examples in the docstrings of the public API print what they say."""

from __future__ import annotations

import doctest
import inspect
import tempfile
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

import dtrain

LEAST = 25
"""Examples that must be found, so that a change of the search cannot leave them out silently."""

MODULES = ("dtrain.checkpoint", "dtrain.errors", "dtrain.integrations.accelerate", "dtrain.integrations.trainer")


def documented() -> Iterator[tuple[str, Any]]:
    """Yields each public name with what has its docstring; of an engine also the classes that it inherits from."""
    for name in dtrain.__all__:
        yield f"dtrain.{name}", getattr(dtrain, name)
    for base in dtrain.Engine.__mro__[1:-1]:
        yield base.__qualname__, base
    for module in map(import_module, MODULES):
        names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
        for name in names:
            yield f"{module.__name__}.{name}", getattr(module, name)


def found() -> dict[str, doctest.DocTest]:
    """Returns the docstrings with examples, each once, by name; a reader has imported dtrain, tempfile and torch."""
    finder, globs = doctest.DocTestFinder(), {"dtrain": dtrain, "tempfile": tempfile, "torch": torch}
    tests: dict[str, doctest.DocTest] = {}
    seen = set()
    for name, value in documented():
        home = inspect.getmodule(value)
        if isinstance(value, ModuleType) or home is None or not home.__name__.startswith("dtrain."):
            continue
        for test in finder.find(value, name, module=home, globs=globs):
            place = (test.filename, test.lineno)
            if test.examples and place not in seen:
                seen.add(place)
                tests[test.name] = test
    return tests


TESTS = found()


def test_the_examples_are_found() -> None:
    assert len(TESTS) >= LEAST, sorted(TESTS)
    assert {"dtrain.initialize", "dtrain.Engine.save", "dtrain.StepOutcome", "TrainingLoop.accumulate"} <= TESTS.keys()


@pytest.mark.parametrize("name", TESTS)
def test_an_example_prints_what_it_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the examples' inputs are on the CPU
    report: list[str] = []
    matmul, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        result = doctest.DocTestRunner().run(TESTS[name], out=report.append)
    torch.set_float32_matmul_precision(matmul)
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    assert result.attempted
    assert not result.failed, "".join(report)
