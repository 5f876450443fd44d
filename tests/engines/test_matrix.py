"""Every check of ``tests/engines/checks`` in every case of its axes; see ``tests/engines/matrix.py``."""

from __future__ import annotations

import pytest

import tests.engines.checks  # noqa: F401 - registers them
from tests.engines.matrix import CHECKS, Case, tiers

CASES = [
    pytest.param(name, case, id=f"{name}-{case}", marks=[pytest.mark.exhaustive] if is_exhaustive else [])
    for name, case, is_exhaustive in tiers("tests.engines")
]


@pytest.mark.processes
@pytest.mark.parametrize(("name", "case"), CASES)
def test_matrix(name: str, case: Case) -> None:
    CHECKS[name].require(case)
