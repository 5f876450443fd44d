"""Skips for what the PyTorch at hand lacks, each with one line that says so."""

from __future__ import annotations

import pytest
import torch

from dtrain.precision.hardware import has_row_scales_on_cpu


def row_scales_on_cpu(*, rowwise: bool, emulate: bool = False) -> None:
    """Skips a test of ``torch._scaled_mm`` with one scale per row."""
    if rowwise and not emulate and not has_row_scales_on_cpu():
        pytest.skip(f"torch._scaled_mm of torch {torch.__version__} takes no scale per row on a CPU")
