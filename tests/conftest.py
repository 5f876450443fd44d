"""Options, selection of marked tests, and fixtures that hold for every test."""

from __future__ import annotations

import functools
import gc
import logging
import multiprocessing.process
import os
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dtrain.distributed.logging import logger
from dtrain.distributed.startup.setup import disconnect
from tests.gpu.device import ON_CPU
from tests.helpers.fault_counts import FaultCounts, FaultTotals

_TESTS = Path(__file__).parent
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before dtrain.kernels is imported
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of about 200 processes would compile dtrain again
torch.set_num_threads(1)  # the workers of pytest-xdist share the cores; waiting threads would spin on them

try:  # tests/gpu runs without it
    import hypothesis
except ImportError:
    pass
else:
    hypothesis.settings.register_profile(
        "busy-machine", hypothesis.settings(), deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("busy-machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of the fault suite, and a random order."""
    parser.addoption("--random-order", type=int, metavar="SEED", help="run the tests in an order drawn with SEED")
    fuzz = parser.getgroup("fuzz")
    fuzz.addoption("--fuzz-cases", type=int, default=240, help="how many cases tests/corpus/test_fuzz.py trains")
    fuzz.addoption("--fuzz-seed", type=int, default=0, help="draws them")
    group = parser.getgroup("faults")
    group.addoption("--fault-counts", choices=("ci", "full"), default="ci", help="how many faults tests/faults tries")
    group.addoption("--fault-results", type=Path, metavar="DIR", help="where each of these tests writes what it found")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests by folder and by name; what only ``-m`` selects is left out, and under any ``-m`` also ``gpu``."""
    for item in items:
        folder = item.path.relative_to(_TESTS).parts[0]
        if folder == "faults" or "faults" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.faults)
        if folder == "faults":
            item.add_marker(pytest.mark.processes)
        elif folder == "gpu":
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available() and not ON_CPU:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if "deepspeed" in item.nodeid:
            item.add_marker(pytest.mark.deepspeed)
    # files that start processes take longest; the short ones at the end keep all workers busy until the last
    slow = {item.path for item in items if any(item.get_closest_marker(name) for name in _MARKERS_OF_PROCESSES)}
    items.sort(key=lambda item: item.path not in slow)
    if (seed := config.getoption("random_order")) is not None:
        random.Random(seed).shuffle(items)
    expression = config.getoption("markexpr")
    named = set(re.findall(r"\w+", expression))
    unnamed = ({"exhaustive", "gpu"} if expression else {"exhaustive"}) - named
    if config.getoption("fault_counts") == "full":
        unnamed.discard("exhaustive")
    deselected = [item for item in items if any(item.get_closest_marker(name) for name in unnamed)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in set(deselected)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Makes tests cheaper: the text of ``data=stdlib`` is read once, and what is imported by now costs no time."""
    from dtrain.data import text

    read = functools.cache(lambda folder, documents=text.stdlib_documents: documents())
    text.stdlib_documents = lambda: read(sysconfig.get_path("stdlib"))
    gc.freeze()  # garbage collections do not visit them
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch."):  # a hundred, to each of which pytest adds a handler if it does not propagate
            logging.getLogger(name).propagate = True


_MARKERS_OF_PROCESSES = ("processes", "deepspeed", "compile", "faults", "gpu")
_FORKS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "tests.Process.start"}
_unmarked: str | None = None  # the test that runs, if it may start no process


def _refuse_processes(event: str, args: tuple[Any, ...]) -> None:
    if _unmarked is not None and event in _FORKS:
        pytest.fail(
            f"{_unmarked} starts a process ({event} {args!r:.100}) without a marker; add @pytest.mark.processes, or "
            "pytestmark = pytest.mark.processes to its file"
        )


def _audited_start(self: multiprocessing.process.BaseProcess) -> None:
    sys.audit("tests.Process.start", type(self).__name__)  # a running fork server forks without an event
    _start(self)


_start = multiprocessing.process.BaseProcess.start
multiprocessing.process.BaseProcess.start = _audited_start  # type: ignore[method-assign]
sys.addaudithook(_refuse_processes)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Lets only marked tests, and their fixtures, start processes."""
    global _unmarked
    if not any(item.get_closest_marker(name) for name in _MARKERS_OF_PROCESSES):
        _unmarked = item.nodeid
    yield
    _unmarked = None


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The override that names a text; see ``tests.helpers.launch.write_samples``."""
    from tests.helpers.launch import write_samples

    return write_samples(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def fault_totals() -> dict[str, FaultTotals]:
    """Findings of the fault suite so far, by test."""
    return {}


@pytest.fixture
def faults(request: pytest.FixtureRequest, fault_totals: dict[str, FaultTotals]) -> FaultCounts:
    """Number of faults that a test tries, and the file that it writes its findings to."""
    full, folder = (request.config.getoption(name) for name in ("fault_counts", "fault_results"))
    return FaultCounts(request.node.originalname, full=full == "full", folder=folder, totals=fault_totals)


# without a GPU, torch.manual_seed keeps each call for later, with three stacks
_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
_LOGGER = (list(logger.handlers), logger.level, logger.propagate)


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Gives each test the same logger, random numbers, settings of torch, environment, one thread, and no group."""
    from dtrain.train.setup import torch_settings_restored  # imports dtrain.kernels, which reads TRITON_INTERPRET

    _seed(0)
    torch.set_num_threads(1)
    _restore_logger()
    is_connected = dist.is_initialized()
    with torch_settings_restored(), mock.patch.dict(os.environ):
        yield
    if dist.is_initialized() and not is_connected:
        disconnect()
    _restore_logger()


def _restore_logger() -> None:
    """A run inside the test process sets up the project's logger for that process."""
    logger.handlers[:], level, logger.propagate = _LOGGER
    logger.setLevel(level)
