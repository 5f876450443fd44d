"""How many faults a test of the fault suite tries, and the record of what it found."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dtrain.tools.host import describe_host


@dataclass
class FaultTally:
    """What the cases of one test function have found together."""

    count: int = 0
    found: Counter[str] = field(default_factory=Counter)
    seeds: list[int] = field(default_factory=list)
    seconds: float = 0.0


class FaultCounts:
    """The counts and the record of one case of a test.

    Args:
        test: the name of its function.
        full: whether the counts are those of a full run, else those of every run of the suite.
        folder: where the record goes; None: nowhere.
        tallies: of the functions of this session, by name.
    """

    def __init__(self, test: str, *, full: bool, folder: Path | None, tallies: dict[str, FaultTally]) -> None:
        self.full = full
        self._test = test
        self._folder = folder
        self._tallies = tallies
        self._began = time.monotonic()

    def count(self, *, ci: int, full: int) -> int:
        """The number of faults to try."""
        return full if self.full else ci

    def passed(self, fault: str, count: int, *, seed: int | None = None, **figures: int) -> None:
        """Adds what a case that has passed found to the record of its function.

        Args:
            fault: its number in the fault suite, such as ``F15``.
            count: how many faults were tried.
            seed: of the random ones.
            figures: what was counted, ``lost_commits=0`` say.
        """
        if self._folder is None:
            return
        tally = self._tallies.setdefault(self._test, FaultTally())
        tally.count += count
        tally.found.update(figures)
        tally.seeds += [] if seed is None else [seed]
        tally.seconds += time.monotonic() - self._began
        record = {
            "fault": fault,
            "test": self._test,
            "counts": "full" if self.full else "ci",
            "count": tally.count,
            "found": tally.found,
            "seeds": tally.seeds,
            "seconds": round(tally.seconds, 1),
            "host": asdict(describe_host()),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^a-z0-9]+", "-", f"{fault} {self._test}".lower()).strip("-")
        (self._folder / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
