from __future__ import annotations

import pytest

from tests.helpers.launch import LAUNCHER


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher and no precision in the environment, whatever started the tests."""
    for name in (*LAUNCHER, "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
