"""The page of silent faults has the tables of the rows; README has their numbers."""

from __future__ import annotations

import re

import pytest

from tests.corpus.rows import ROWS, Row
from tests.corpus.table import PAGE, TABLES, counts, rows, table
from tests.engines.matrix import CHECKS, Case
from tests.helpers.promises import ROOT

WORDS = 30
_SOURCES = {"fault": re.compile(r"[\w.-]+/[\w.-]+#\d+"), "assertion": re.compile(r"[\w.-]+/[\w.-]+ [\w./-]+\.py::\S+")}


def test_the_page_has_the_tables_of_the_rows() -> None:
    found = TABLES.findall(PAGE.read_text(encoding="utf-8"))
    assert [kind for _, kind, _, _ in found] == ["faults", "assertions"]
    for _, kind, text, _ in found:
        assert text == table(kind), "python -m tests.corpus.table"


def test_the_readme_has_the_numbers_of_the_faults() -> None:
    faults = counts("fault")
    line = f"{faults.total()} [silent faults that users of other trainers reported](docs/trust/silent-faults.md)"
    numbers = f"{faults['right']} right, {faults['refused']} refused by name, 0 wrong"
    assert f"{line}: {numbers}" in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert faults.total() >= 30
    assert len(rows("assertion")) >= 60


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.check)
def test_a_row_says_where_it_is_from(row: Row) -> None:
    assert _SOURCES[row.kind].fullmatch(row.source)
    assert row.says.endswith(".")
    assert len(row.says.split()) <= WORDS
    assert "|" not in row.says + "".join(row.refused.values())
    assert bool(row.peers) == (row.kind == "fault")
    known = {key for case in CHECKS[row.check].cases for key in (case.engine, f"{case.engine}-{case.stage}")}
    assert set(row.refused) <= known, "an engine that no case has refuses nothing"


def test_a_refusal_is_that_of_the_engine_or_of_its_stage() -> None:
    row = Row("fault", "a/b#1", "It.", "a", "check", refused={"fsdp2": "never", "native-3": "sharded"})
    assert row.outcome(Case("native", 2)) == "right"
    assert row.outcome(Case("native", 3)) == "refused: sharded"
    assert row.outcome(Case("fsdp2", 2)) == "refused: never"
