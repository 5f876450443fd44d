"""Skips for what the PyTorch at hand lacks, each with one line that says so."""

from __future__ import annotations

import pytest
import torch

from dtrain.precision.float8.options import Recipe
from dtrain.precision.hardware import has_row_scales_on_cpu


def products_on_cpu(recipe: str, *, emulate: bool = False) -> None:
    """Skips a test of real FP8 products in a recipe that a CPU does not multiply in."""
    if emulate:
        return
    if Recipe(recipe).scaling.in_blocks:
        pytest.skip("torch has no scaled_mm with scales of blocks on a CPU")
    if recipe != "tensorwise" and not has_row_scales_on_cpu():
        pytest.skip(f"scaled_mm of torch {torch.__version__} takes no scale per row on a CPU")
