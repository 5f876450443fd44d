"""The tests of ``tests/gpu``, if this is a checkout: counts, failed tests with their tracebacks, reasons of skips.

pytest runs in a process of its own, so that this one reads its records as they come. It runs ``options["workers"]``
processes side by side if pytest-xdist is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dtrain.measure.accept.job import Request
from dtrain.tools.processes import describe_exit
from dtrain.tools.tables import Table, plural

FILES = tuple(
    f"tests/gpu/test_{name}.py"
    for name in (
        "kernels", "engine", "float8", "engines", "formats", "loss_head", "measurement", "offload", "attention",
        "autocast_ops", "optimizers",
    )
)  # fmt: skip
"""The most fundamental first."""

ALONE = ("tests/gpu/test_streams.py", "tests/gpu/test_float8.py::test_what_is_timed_is_never_slower")
"""These measure times of the host or the device, so nothing runs beside them."""

QUICK = "infinity_on or skip_names or resume_is or linalg"
"""Selects tests that take seconds when the CPU replaces the device."""

RECORDS, BEGUN = "DTRAIN_RECORDS", "DTRAIN_BEGUN"
"""Variables of the environment that tell the plugin where to write, and which tests to leave out."""

_TEST_S = 75  # of one test, which may compile
_STARTS = 20  # of pytest: a process without xdist ends with each error that the device does not survive
_POLL_S, _SAVE_S = 0.1, 2.0
_WELL = (0, 1, 5)  # exit codes of pytest that ended by itself: passed, failed, nothing to run


def run(request: Request) -> Iterator[dict[str, Any]]:
    """Runs the files in order of value; the tests that a crash has left start again without those that have begun."""
    root, reason = find_tests(request.options.get("root"))
    results: dict[str, Any] = {"tests": {}, "failures": [], "left_out": {}}
    if root is None:
        results["left_out"]["tests/gpu"] = reason
        yield results
        return
    name = Path(request.output).name.split(".")[0]
    records, begun = (Path(request.directory, f"{name}.{kind}") for kind in ("jsonl", "begun"))
    records.unlink(missing_ok=True)
    for _ in range(_STARTS):
        begun.write_text("".join(f"{test}\n" for test in read_records(records)), encoding="utf-8")
        process = subprocess.Popen(
            _command(request), cwd=root, stdin=subprocess.DEVNULL, env=_environment(request, records, begun)
        )
        saved = time.monotonic()
        while process.poll() is None:
            time.sleep(_POLL_S)
            if time.monotonic() - saved > _SAVE_S:
                saved = time.monotonic()
                yield _summary(results, records, has_ended=False)
        num_begun = len(begun.read_text(encoding="utf-8").splitlines())
        if process.returncode in _WELL or len(read_records(records)) == num_begun:
            break
    if process.returncode not in _WELL:
        results["ending"] = f"pytest {describe_exit(process.returncode)}"
    yield _summary(results, records, has_ended=True)


def find_tests(root: str | None = None) -> tuple[Path | None, str]:
    """Returns the root of the checkout, or None with the reason why there are no tests to run."""
    found = Path(root) if root else Path(__file__).resolve().parents[4]
    if not (found / "tests/gpu").is_dir():
        return None, "this is an installed package, which has no tests; run dtrain accept in a checkout"
    if find_spec("pytest") is None:
        return None, "pytest is not installed: pip install 'dtrain[test]'"
    return found, ""


def _command(request: Request) -> list[str]:
    # without the options of the project's configuration, some of which need plugins
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q", "--tb=short"]
    command += ["--color=no", "--continue-on-collection-errors", "-p", "dtrain.measure.accept.recorder"]
    if find_spec("pytest_timeout") is not None:  # a hang ends one process, not the time of all
        command += [f"--timeout={_TEST_S}", "--timeout-method=thread"]
    workers = request.options.get("workers", 1)
    if find_spec("xdist") is not None:
        command += ["-n", str(workers), "--dist", "load", "--maxschedchunk", "2", "--max-worker-restart", "60"]
    chosen = " and ".join(f"({words})" for words in request.options.get("select", []))
    return [*command, *(["-k", chosen] if chosen else []), *request.options["files"]]


def _environment(request: Request, records: Path, begun: Path) -> dict[str, str]:
    extra = {RECORDS: str(records), BEGUN: str(begun), "OMP_NUM_THREADS": "1"}
    if request.device == "cpu":
        extra["DTRAIN_GPU_TESTS_ON_CPU"] = "1"
    return {**os.environ, **extra}


def read_records(path: Path) -> dict[str, dict[str, Any] | None]:
    """Returns the tests that have begun, each with its result: the worst of its phases, or None if it did not end."""
    tests: dict[str, dict[str, Any] | None] = {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    for text in lines:
        if not text.endswith("\n"):  # killed while it wrote
            continue
        line = json.loads(text)
        if "begin" in line:
            tests.setdefault(line["begin"], None)
        elif (tests.get(line["test"]) or {}).get("outcome") != "failed":
            tests[line["test"]] = line
    return tests


def _summary(results: dict[str, Any], records: Path, *, has_ended: bool) -> dict[str, Any]:
    tests = read_records(records)
    failures = [f"{test}: {_failure(line)}" for test, line in tests.items() if line and line["outcome"] == "failed"]
    lost = [f"{test}: its process ended in it" for test, line in tests.items() if line is None and has_ended]
    return results | {"tests": tests, "failures": [*failures, *lost]}


def _failure(line: Mapping[str, Any]) -> str:
    errors = [text for text in line["text"].splitlines() if text.startswith("E ")]
    text = (errors[0][1:] if errors else line["text"][-200:]).strip()
    dead = f"; the device does not answer after it: {line['dead']}" if line.get("dead") else ""
    return f"{'' if line['when'] == 'call' else line['when'] + ': '}{text[:300]}{dead}"


def counts(tests: Mapping[str, Mapping[str, Any] | None]) -> Counter[str]:
    """Returns how many tests passed, failed, were skipped, or did not end."""
    return Counter("not ended" if line is None else line["outcome"] for line in tests.values())


def conclusions(results: Mapping[str, Any]) -> list[str]:
    found = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts(results["tests"]).items()))
    return [f"tests: {found or 'none ran'}{f'; {ending}' if (ending := results.get('ending')) else ''}"]


def section(results: Mapping[str, Any]) -> list[str]:
    """Returns counts by file, the slowest tests, the reasons of skips, and the ends of tracebacks."""
    tests = results["tests"]
    by_file: dict[str, dict[str, Any]] = {}
    for test, line in tests.items():
        by_file.setdefault(test.split("::")[0], {})[test] = line
    outcomes = ("passed", "failed", "skipped", "not ended")
    rows = [
        (file, *(str(counts(own)[outcome]) for outcome in outcomes), f"{_seconds(own.values()):.0f}")
        for file, own in by_file.items()
    ]
    lines = [Table("Tests", ("file", *outcomes, "s"), rows).markdown()] if rows else ["No test ran."]
    ended = [line for line in tests.values() if line is not None]
    slowest = sorted(ended, key=lambda line: -line["s"])[:5]
    lines += ["", "Slowest: " + ", ".join(f"`{line['test'].split('::')[-1]}` {line['s']:.0f} s" for line in slowest)]
    skips = Counter(line["text"][:160] for line in ended if line["outcome"] == "skipped")
    lines += (
        ["", "Skipped:", "", *(f"- {plural(count, 'test')}: {reason}" for reason, count in skips.items())]
        if skips
        else []
    )
    for line in [line for line in ended if line["outcome"] == "failed"][:10]:
        lines += ["", f"`{line['test']}`:", "", "```text", *line["text"].splitlines()[-12:], "```"]
    return lines


def _seconds(lines: Iterable[Mapping[str, Any] | None]) -> float:
    return float(sum(line["s"] for line in lines if line is not None))
