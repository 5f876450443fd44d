"""Every row of the corpus in every case of its axes; see ``tests/corpus/rows.py``."""

from __future__ import annotations

import pytest

import tests.corpus.assertions
import tests.corpus.faults  # noqa: F401 - both register their rows
from tests.engines.matrix import CHECKS, Case, every_value, one_case, tiers

SLOW = {("deepspeed", stage): 9 for stage in range(4)}
CASES = [
    pytest.param(name, case, id=f"{name}-{case}", marks=[pytest.mark.exhaustive] if is_exhaustive else [])
    for name, case, is_exhaustive in tiers("tests.corpus", one_case, every_value, SLOW)
]


@pytest.mark.processes
@pytest.mark.parametrize(("name", "case"), CASES)
def test_row(name: str, case: Case) -> None:
    CHECKS[name].require(case)
