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


def outcome(row: Row) -> str:
    """What most engines do, then the engines, or their ZeRO stages, whose outcome differs."""
    places: dict[str, dict[str, set[int]]] = {}  # stages by engine, by what they do
    for engine in ENGINES:
        cases = [case for case in CHECKS[row.check].cases if case.engine == engine]
        if not cases:
            missing = f"left out: {row.skipped[engine]}" if engine in row.skipped else "not available"
            places.setdefault(missing, {})[engine] = set()
        for case in cases:
            places.setdefault(row.outcome(case), {}).setdefault(engine, set()).add(case.stage)
    most = max(places, key=lambda found: sum(map(len, places[found].values())))
    words = [most]
    for found, engines in places.items():
        if found != most:
            named = (_stages(engine, stages, found, places) for engine, stages in engines.items())
            words.append(f"{', '.join(named)}: {found}")
    return "; ".join(words)


def _stages(engine: str, stages: set[int], found: str, places: dict[str, dict[str, set[int]]]) -> str:
    is_whole = not any(engine in engines for other, engines in places.items() if other != found)
    return f"`{engine}`" if is_whole else f"`{engine}` {', '.join(map(str, sorted(stages)))}"


def counts(kind: str) -> Counter[str]:
    """How many rows of a kind all engines get ``right``, and how many some engine has ``refused``."""
    refused = ["refused" in {row.outcome(case).split(":")[0] for case in CHECKS[row.check].cases} for row in rows(kind)]
    return Counter("refused" if is_refused else "right" for is_refused in refused)


def rows(kind: str) -> list[Row]:
    """The rows of a kind by source."""
    return sorted((row for row in ROWS if row.kind == kind), key=lambda row: (row.source.lower(), row.says))


def table(kind: str) -> str:
    """The table of ``faults`` or ``assertions`` in Markdown."""
    if kind == "faults":
        faults = [(row.says, _link(row.source), row.peers, outcome(row)) for row in rows("fault")]
        return Table("", ("fault", "reported in", "had by", "dtrain"), faults).markdown()
    assertions = [(row.says, _test(row.source), outcome(row)) for row in rows("assertion")]
    return Table("", ("assertion", "asserted in", "dtrain"), assertions).markdown()


def _link(source: str) -> str:
    repository, number = source.split("#")
    return f"[{repository.partition('/')[2]} {number}](https://github.com/{repository}/issues/{number})"


def _test(source: str) -> str:
    repository, place = source.split(" ", 1)
    return f"{repository.partition('/')[2]}: `{place.rpartition('/')[2]}`"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLES.sub(lambda found: found[1] + table(found[2]) + found[4], text), encoding="utf-8")
