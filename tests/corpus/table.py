"""The tables of ``docs/trust/silent-faults.md``, which follow from the rows.

``python -m tests.corpus.table`` writes them.
"""

from __future__ import annotations

import re
from collections import Counter

import tests.corpus.assertions
import tests.corpus.faults  # noqa: F401 - both register their rows
from dtrain.tools.tables import Table
from tests.corpus.rows import ROWS, Row
from tests.engines.matrix import CHECKS, ENGINES
from tests.helpers.promises import ROOT

PAGE = ROOT / "docs/trust/silent-faults.md"
TABLES = re.compile(r"(<!-- (faults|assertions) -->\n\n)(.*?)(\n\n<!-- end \2 -->)", re.DOTALL)


def outcomes(row: Row, engine: str) -> str:
    """What the engine does, by stage if they differ."""
    cases = [case for case in CHECKS[row.check].cases if case.engine == engine]
    stages: dict[str, list[str]] = {}
    for case in sorted(cases, key=lambda case: case.stage):
        found = stages.setdefault(row.outcome(case), [])
        if str(case.stage) not in found:
            found.append(str(case.stage))
    if not stages:
        return f"left out: {row.skipped[engine]}" if engine in row.skipped else "not available"
    if len(stages) == 1:
        return next(iter(stages))
    return "<br>".join(f"stage {', '.join(numbers)}: {outcome}" for outcome, numbers in stages.items())


def counts(kind: str) -> Counter[str]:
    """How many rows of a kind are ``right`` with every engine, and of how many some engine ``refused``."""
    refused = ["refused" in {row.outcome(case).split(":")[0] for case in CHECKS[row.check].cases} for row in rows(kind)]
    return Counter("refused" if is_refused else "right" for is_refused in refused)


def rows(kind: str) -> list[Row]:
    """The rows of a kind by source."""
    return sorted((row for row in ROWS if row.kind == kind), key=lambda row: (row.source.lower(), row.says))


def table(kind: str) -> str:
    """The table of ``faults`` or ``assertions`` in Markdown."""
    if kind == "faults":
        faults = [(row.says, _link(row.source), row.peers, *_cells(row)) for row in rows("fault")]
        return Table("", ("fault", "reported in", "had by", *ENGINES), faults).markdown()
    assertions = [(row.says, _test(row.source), *_cells(row)) for row in rows("assertion")]
    return Table("", ("assertion", "asserted in", *ENGINES), assertions).markdown()


def _cells(row: Row) -> list[str]:
    return [outcomes(row, engine) for engine in ENGINES]


def _link(source: str) -> str:
    repository, number = source.split("#")
    return f"[{repository} {number}](https://github.com/{repository}/issues/{number})"


def _test(source: str) -> str:
    repository, place = source.split(" ", 1)
    return f"{repository}: `{place.rpartition('/')[2]}`"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLES.sub(lambda found: found[1] + table(found[2]) + found[4], text), encoding="utf-8")
