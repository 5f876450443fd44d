"""What a machine needs before code is compiled on it, and the versions of Triton that compile wrongly."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from dtrain.precision.hardware import has_compiler, triton_problem

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    """Replaces the machine's compilers, Triton and headers by those named in the set."""
    found = {"gcc", "triton"}
    (tmp_path / "Python.h").touch()
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in found else None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in found else None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "elsewhere"))
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path))
    return found


def test_a_gpu_needs_triton_and_a_compiler_of_c(
    tools: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert has_compiler(CPU)
    assert has_compiler(GPU)
    tools.remove("triton")
    assert not has_compiler(GPU)
    tools |= {"triton", "c++"}
    tools.remove("gcc")
    assert has_compiler(CPU)
    assert not has_compiler(GPU), "Triton does not look for c++"
    monkeypatch.setenv("CC", "c++")
    assert has_compiler(GPU)
    (tmp_path / "Python.h").unlink()  # both need the headers of Python
    assert not has_compiler(CPU)
    assert not has_compiler(GPU)


@pytest.mark.parametrize(
    ("version", "is_bad"),
    [("3.8.0", True), ("3.8.1+git1234", True), ("3.7.0", False), ("3.80.0", False), ("not installed", False)],
)
def test_versions_of_triton_known_as_bad_are_named(version: str, is_bad: bool) -> None:
    assert ("triton issue 11111" in (triton_problem(version) or "")) == is_bad
    assert triton_problem(None) is None
