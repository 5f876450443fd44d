"""Folders of tiny models of transformers; and no test here may ask the network for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.hf_models import FAMILIES, save_hf


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save_hf(root / family, family) for family in FAMILIES}


@pytest.fixture(autouse=True)
def _no_network(no_network: None) -> None:
    pass
