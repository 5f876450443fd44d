"""Gives each test the state of a process in which accelerate has not been used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.accelerate_loops import reset_accelerate


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    reset_accelerate()
    yield
    reset_accelerate()
