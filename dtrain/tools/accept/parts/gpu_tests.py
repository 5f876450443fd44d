"""The tests of ``tests/gpu``, if this is a checkout: counts, the names of failed tests, and the reasons of skips."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dtrain.tools.ranks import describe_exit

_FOLDER = "tests/gpu"
_FIRST = ("test_kernels.py", "test_engine.py", "test_float8.py", "test_engines.py")
"""Files in order of value; the others follow."""

_RESULT = re.compile(
    rf"^({_FOLDER}/\S+?::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)(?: \((.*)\))? *(?:\[ *\d+%\])?$", re.M
)
_FAILURE = re.compile(rf"^(?:FAILED|ERROR) ({_FOLDER}/\S+?(?:::.+?)?)(?: - (.*))?$", re.M)
_SKIP = re.compile(r"^SKIPPED \[(\d+)\] \S+: (.*)$", re.M)
_COLLECTED = re.compile(r"^(?:collecting \.\.\. )?collected (\d+) items?", re.M)
_LEAST_S = 5.0
_TEST_S = 120  # of one test, which may compile
_OUTCOMES = {"PASSED": "passed", "XFAIL": "passed", "SKIPPED": "skipped"}


def find_tests() -> tuple[Path | None, str]:
    """Returns the root of the checkout, or None with the reason why there are no tests to run."""
    root = Path(__file__).resolve().parents[4]
    if not (root / _FOLDER).is_dir():
        return None, "this is an installed package, which has no tests; run dtrain accept in a checkout"
    if find_spec("pytest") is None:
        return None, "pytest is not installed: pip install 'dtrain[test]'"
    return root, ""


def run_gpu_tests(
    root: Path, device: str, deadline: float, folder: Path, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Runs the files in order of value until ``deadline`` (of ``time.monotonic``); ``save`` gets what is known so far.

    Each file has its own process on a GPU, because an illegal access fails all later tests of a process. Without a
    GPU one process skips them all.
    """
    names = sorted(path.name for path in (root / _FOLDER).glob("test_*.py"))
    names.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    groups = [[name] for name in names] if device == "cuda" else [names]
    results: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": {}, "skips": {}, "unfinished": {}}
    for group in groups:
        seconds = deadline - time.monotonic()
        if seconds < _LEAST_S:
            results["unfinished"] |= dict.fromkeys(group, "no time left")
            continue
        log = folder / f"{Path(group[0]).stem if len(group) == 1 else 'tests'}.log"
        ending = _run_files(root, group, seconds, log)
        text = log.read_text(encoding="utf-8", errors="replace")
        add_results(results, text, group, ending, log.name)
        save(results)
    return results


def add_results(results: dict[str, Any], text: str, files: Sequence[str], ending: str, log: str) -> None:
    """Adds the results in ``text``, what ``pytest -v -rfEs`` printed; ``ending`` is empty if it ended by itself."""
    outcomes = {test: outcome for test, outcome, _ in _RESULT.findall(text)}
    reasons = dict(_FAILURE.findall(text))
    for test, outcome in outcomes.items():
        results[_OUTCOMES.get(outcome, "failed")] += 1
        if outcome not in _OUTCOMES:
            results["failures"][test] = reasons.get(test) or f"see {log}"
    for test, reason in reasons.items():
        if test not in outcomes:  # a file that cannot be imported
            results["failed"] += 1
            results["failures"][test] = reason
    skips = Counter(results["skips"])
    for count, reason in _SKIP.findall(text):
        skips[reason] += int(count)
    results["skips"] = dict(skips)
    collected = _COLLECTED.search(text)
    if ending:
        missing = int(collected[1]) - len(outcomes) if collected else 0
        what = f"{missing} of {collected[1]} tests did not run" if collected else "no test ran"
        results["unfinished"][", ".join(files)] = f"{ending}; {what}"


def _run_files(root: Path, names: Sequence[str], seconds: float, log: Path) -> str:
    """Returns how pytest was interrupted; empty if it ended by itself."""
    command = [sys.executable, "-m", "pytest", *(f"{_FOLDER}/{name}" for name in names)]
    # without the options of the project's configuration, some of which need plugins
    command += ["-o", "addopts=", "-p", "no:cacheprovider", "-v", "-rfEs", "--tb=short", "--color=no"]
    if find_spec("pytest_timeout") is not None:  # a hang ends its own file, not the time of all
        command += [f"--timeout={_TEST_S}", "--timeout-method=thread"]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=root, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, text=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"not finished after {seconds:.0f} s"
        finally:
            process.kill()
            process.wait()
    return "" if code in (0, 1, 5) else f"pytest {describe_exit(code)}"
