"""Fixtures of the fault suite."""

from __future__ import annotations

import pytest

from tests.helpers.kills import Records
from tests.helpers.launch import write_samples


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_samples(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, data: str) -> Records:
    """The runs by world size that nothing ends before their time."""
    return Records(tmp_path_factory.mktemp("whole"), data)
