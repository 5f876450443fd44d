from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.tools.data import inputs
from tests.helpers.corpora import write_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return write_tokenizer(tmp_path / "model" / "tokenizer.json")


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work units of 20 kB, so that small files give several shards."""
    monkeypatch.setattr(inputs, "MIN_UNIT_BYTES", 20_000)
