"""What the page says of the tests of ``tests/gpu``: counts, failed tests with their tracebacks, reasons of skips."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dtrain.measure.accept.job import Lines
from dtrain.tools.tables import Table, plural

RECORDS = "DTRAIN_RECORDS"
"""Variable of the environment that tells the plugin where to write."""


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


def lines_of_tests(path: Path, *, has_ended: bool) -> Lines:
    """Returns counts by file, the slowest tests, the reasons of skips, and the ends of tracebacks."""
    tests = read_records(path)
    failures = [f"{test}: {_failure(line)}" for test, line in tests.items() if line and line["outcome"] == "failed"]
    if has_ended:  # else the command has killed it
        failures += [f"{test}: its process ended in it" for test, line in tests.items() if line is None]
    counted = ", ".join(f"{count} {outcome}" for outcome, count in sorted(_counts(tests.values()).items()))
    ended = [line for line in tests.values() if line is not None]
    section = _tables(tests, ended)
    for line in [line for line in ended if line["outcome"] == "failed"][:10]:
        section += ["", f"`{line['test']}`:", "", "```text", *line["text"].splitlines()[-12:], "```"]
    return Lines([counted or "none ran"], failures, {}, section)


def _tables(tests: Mapping[str, Mapping[str, Any] | None], ended: Iterable[Mapping[str, Any]]) -> list[str]:
    by_file: dict[str, list[Any]] = {}
    for test, line in tests.items():
        by_file.setdefault(test.split("::")[0], []).append(line)
    outcomes = ("passed", "failed", "skipped", "not ended")
    rows = [
        (file, *(str(_counts(own)[outcome]) for outcome in outcomes), f"{sum(line['s'] for line in own if line):.0f}")
        for file, own in by_file.items()
    ]
    if not rows:
        return ["No test ran."]
    slowest = sorted(ended, key=lambda line: -float(line["s"]))[:5]
    lines = [Table("Tests", ("file", *outcomes, "s"), rows).markdown(), ""]
    lines += ["Slowest: " + ", ".join(f"`{line['test'].split('::')[-1]}` {line['s']:.0f} s" for line in slowest)]
    skips = Counter(line["text"][:160] for line in ended if line["outcome"] == "skipped")
    if skips:
        lines += ["", "Skipped:", "", *(f"- {plural(count, 'test')}: {reason}" for reason, count in skips.items())]
    return lines


def _counts(lines: Iterable[Mapping[str, Any] | None]) -> Counter[str]:
    return Counter("not ended" if line is None else line["outcome"] for line in lines)


def _failure(line: Mapping[str, Any]) -> str:
    errors = [text for text in line["text"].splitlines() if text.startswith("E ")]
    text = (errors[0][1:] if errors else line["text"][-200:]).strip()
    dead = f"; the device does not answer after it: {line['dead']}" if line.get("dead") else ""
    return f"{'' if line['when'] == 'call' else line['when'] + ': '}{text[:300]}{dead}"
