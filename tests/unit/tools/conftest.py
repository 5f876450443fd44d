from __future__ import annotations

import pytest

from tests.helpers import forked_ranks

_STARTERS = ("ranks", "bench.training.processes", "data.pool", "accept.job")


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets commands fork their ranks from the warm server; ``test_ranks.py`` tests the processes that they start."""
    for module in _STARTERS:
        monkeypatch.setattr(f"dtrain.tools.{module}.start_rank", forked_ranks.start_rank)
