"""The table of ``docs/trust/reliability.md``: each promise, the tests that hold it, and the last recorded figures.

After a full run of the fault suite, ``python -m tests.helpers.promises`` writes the figures.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from dtrain.tools.tables import Table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results/faults"
PAGE = ROOT / "docs/trust/reliability.md"

FAULTS = {
    "F1": "kills at random instants",
    "F2": "kills at named points",
    "F3": "stop signals",
    "F4": "hangs",
    "F5": "damaged files and manifests",
    "F6": "hostile files and leases",
    "F7": "Inf, NaN and huge values",
    "F8": "flipped bits",
    "F9": "mismatches of one rank",
    "F10": "I/O errors",
    "F11": "changes of engine and ranks",
    "F12": "world sizes, stages and precisions",
    "F13": "jobs that compete for a directory",
    "F14": "restarts after a crash",
    "F15": "states after a power cut",
    "P6": "samples through two kills and three numbers of ranks",
    "P9": "kills of ranks, launchers and hosts",
    "P11": "starts on a full disk",
    "P15": "launchers with a listening job",
    "P16": "planted secrets",
    "divergence": "pairs of methods that ranks are at",
}
"""What the count of a record counts."""
FAULTS_OF = {
    "P1": "F7 F9 divergence", "P2": "F7", "P3": "F2 F5 F15", "P4": "F1", "P5": "F12", "P6": "P6", "P7": "F8",
    "P8": "F11", "P9": "F4 P9", "P10": "F3", "P11": "F10 P11", "P12": "F13", "P13": "F14", "P14": "F6",
    "P15": "P15", "P16": "P16",
}  # fmt: skip
"""The faults that try each promise."""


def counts() -> Counter[str]:
    """Number of faults in the recorded full runs, by number in the fault suite."""
    found: Counter[str] = Counter()
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        found[record["fault"]] += record["count"]
    return found


def in_page() -> re.Match[str]:
    """Returns the table in the page, between its markers."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(r"(?<=<!-- promises -->\n).*?(?=\n<!-- end promises -->)", text, re.DOTALL)
    assert found is not None, f"{PAGE} has no table of promises"
    return found


def rows() -> dict[str, list[str]]:
    """Returns the cells of the page by the number of the promise: what it says, its tests, its figures."""
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in in_page()[0].splitlines()[2:]]
    return {row[0].strip("*").split()[0]: row for row in cells}


def promise_table() -> str:
    """Returns the table in Markdown, with the recorded figures."""
    recorded, table = counts(), []
    for number, (promise, tests, _) in rows().items():
        figures = ", ".join(f"{recorded[fault]:,} {FAULTS[fault]}" for fault in FAULTS_OF[number].split())
        table.append((promise, tests, figures))
    return Table("", ("promise", "`pytest` with", "last full run"), table).markdown()


if __name__ == "__main__":
    old = in_page()
    PAGE.write_text(old.string[: old.start()] + promise_table() + old.string[old.end() :], encoding="utf-8")
