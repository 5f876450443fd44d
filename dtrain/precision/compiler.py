"""Whether ``torch.compile`` can be used."""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch


def has_compiler(device: torch.device) -> bool:
    """Whether what ``torch.compile`` needs on ``device`` seems to be there: a C++ compiler, and Triton on a GPU."""
    names = (os.environ.get("CXX") or os.environ.get("CC"), "c++", "g++", "clang++", "gcc", "clang")
    return any(name and shutil.which(name) for name in names) and (
        device.type != "cuda" or importlib.util.find_spec("triton") is not None
    )
