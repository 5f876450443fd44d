"""Fixtures of the fault suite."""

from __future__ import annotations

import pytest

from tests.helpers.kills import Records


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, data: str) -> Records:
    """The runs by world size that nothing ends before their time."""
    return Records(tmp_path_factory.mktemp("whole"), data)
