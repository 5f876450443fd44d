"""Every check of ``tests/engines/checks`` in every case of its axes; see ``tests/engines/matrix.py``."""

from __future__ import annotations

import pytest

import tests.engines.checks  # noqa: F401 - registers them
from tests.engines.matrix import CHECKS, Case

CASES = [
    pytest.param(name, case, id=f"{name}-{case}", marks=marks)
    for name, check in CHECKS.items()
    for cases, marks in ((check.default, []), (check.more, [pytest.mark.exhaustive]))
    for case in cases
]


@pytest.mark.processes
@pytest.mark.parametrize(("name", "case"), CASES)
def test_matrix(name: str, case: Case) -> None:
    CHECKS[name].require(case)
