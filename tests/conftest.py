"""What every test gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtrain.distributed.logging import logger


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    """A run inside the test process sets the project's logger up for that process, and tests come in any order."""
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
