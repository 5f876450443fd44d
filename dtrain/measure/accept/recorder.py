"""A plugin of pytest (``-p dtrain.measure.accept.recorder``) that writes a line as soon as a test begins or ends.

The file is ``DTRAIN_RECORDS``; all processes append to it, so a killed one loses nothing. A process that is started
again with the same file leaves out the tests that have begun. After a test that failed, the device is asked whether it
still answers: an illegal access fails every later call of its process, so the process ends, and pytest-xdist or the
command starts another one for the tests that are left.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from dtrain.measure.accept.tests_report import RECORDS, read_records

DEAD_CODE = 86
_MOST = 6000  # characters of a traceback


def pytest_configure(config: pytest.Config) -> None:
    """Registers the recorder in the processes that run tests: the workers of xdist, or the only process."""
    if RECORDS not in os.environ:
        return
    own = getattr(config, "workerinput", None)
    is_runner = own is not None or not getattr(config.option, "numprocesses", None)
    begun = set(read_records(Path(os.environ[RECORDS]))) if own is None else set(own["begun"])
    config.pluginmanager.register(Recorder(begun, is_runner=is_runner), "dtrain-recorder")


class Recorder:
    """The hooks; ``begun`` has the tests of earlier processes, the same in all workers of xdist."""

    def __init__(self, begun: set[str], *, is_runner: bool) -> None:
        self._begun, self._is_runner = begun, is_runner

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["begun"] = sorted(self._begun)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._begun]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._is_runner:
            _write({"begin": nodeid, "t": time.time()})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self._is_runner:  # a file that cannot be imported
            _write({"begin": report.nodeid, "t": time.time()})
            _write(_line(report, "collect", 0.0))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when != "call" and report.passed:
            return report
        line = _line(report, report.when or "", report.duration)
        if report.failed:
            line["dead"] = _context_error()
        _write(line)
        if line.get("dead"):
            os._exit(DEAD_CODE)  # at once: each further test would fail with the error of this one
        return report


def _line(report: Any, when: str, seconds: float) -> dict[str, Any]:
    text = report.longreprtext if report.failed else str(getattr(report, "longrepr", "") or "")
    if report.skipped and isinstance(report.longrepr, tuple):
        text = report.longrepr[2]
    line = {
        "test": report.nodeid,
        "when": when,
        "outcome": report.outcome,
        "s": round(seconds, 3),
        "text": text[-_MOST:],
    }
    if report.failed:
        output = "".join(body for title, body in report.sections if "log" in title or "stderr" in title)
        line["output"] = output[-2000:]
    return line


def _context_error() -> str:
    """Returns why the device does not answer any more, or an empty string."""
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def _write(line: dict[str, Any]) -> None:
    data = (json.dumps(line) + "\n").encode()
    descriptor = os.open(os.environ[RECORDS], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, data)  # one write: lines of several processes do not mix
    finally:
        os.close(descriptor)
