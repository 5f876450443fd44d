"""Number of faults that a test of the fault suite tries, and the record of its results."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from dtrain.telemetry.host import describe_host

FEW_AND_MANY = pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
"""Each kind of fault once by default; the counts of the fault suite in the exhaustive run."""


@dataclass
class FaultTotals:
    """Sums over the cases of one test function."""

    count: int = 0
    found: Counter[str] = field(default_factory=Counter)
    seeds: list[int] = field(default_factory=list)
    seconds: float = 0.0


class FaultCounts:
    """Counts of one case of a test, those of a ``full`` run or of CI, and its record in ``folder``, if any.

    ``totals`` are those of this session, by name of the test function.
    """

    def __init__(self, test: str, *, full: bool, folder: Path | None, totals: dict[str, FaultTotals]) -> None:
        self.full = full
        self._test = test
        self._folder = folder
        self._totals = totals
        self._began = time.monotonic()

    def count(self, *, ci: int, full: int) -> int:
        """Returns the number of faults to try."""
        return full if self.full else ci

    def passed(self, fault: str, count: int, *, seed: int | None = None, **figures: int) -> None:
        """Adds a passed case of ``count`` faults to the record of its test function, and further counts."""
        if self._folder is None:
            return
        total = self._totals.setdefault(self._test, FaultTotals())
        total.count += count
        total.found.update(figures)
        total.seeds += [] if seed is None else [seed]
        total.seconds += time.monotonic() - self._began
        record = {
            "fault": fault,
            "test": self._test,
            "counts": "full" if self.full else "ci",
            "count": total.count,
            "found": total.found,
            "seeds": total.seeds,
            "seconds": round(total.seconds, 1),
            "host": asdict(describe_host()),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^a-z0-9]+", "-", f"{fault} {self._test}".lower()).strip("-")
        (self._folder / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
