"""What every test gets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.distributed.logging import logger
from tests.helpers.fault_counts import FaultCounts, FaultTally


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the fault suite."""
    group = parser.getgroup("faults")
    group.addoption("--fault-counts", choices=("ci", "full"), default="ci", help="how many faults tests/faults tries")
    group.addoption("--fault-results", type=Path, metavar="DIR", help="where each of these tests writes what it found")


@pytest.fixture(scope="session")
def tallies() -> dict[str, FaultTally]:
    """What the tests of the fault suite have found so far."""
    return {}


@pytest.fixture
def faults(request: pytest.FixtureRequest, tallies: dict[str, FaultTally]) -> FaultCounts:
    """How many faults a test tries, and where it says what it found."""
    full, folder = (request.config.getoption(name) for name in ("fault_counts", "fault_results"))
    return FaultCounts(request.node.originalname, full=full == "full", folder=folder, tallies=tallies)


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    """A run inside the test process sets the project's logger up for that process, and tests come in any order."""
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
