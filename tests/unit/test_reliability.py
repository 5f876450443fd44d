"""``docs/reliability.md`` states what was recorded, and nothing else."""

from __future__ import annotations

import json

from tests.helpers.promises import FAULTS, PROMISES, RESULTS, ROOT, in_page, promise_table


def test_the_page_has_the_recorded_figures() -> None:
    assert in_page()[0] == promise_table(), "python -m tests.helpers.promises"


def test_each_promise_names_tests_that_exist() -> None:
    assert [promise.name.split()[0] for promise in PROMISES] == [f"P{number}" for number in range(1, 17)]
    for promise in PROMISES:
        assert [test for test in promise.tests if not (ROOT / "tests" / test).exists()] == [], promise.name


def test_every_fault_has_a_promise_and_the_record_of_a_full_run() -> None:
    recorded = set()
    for path in RESULTS.glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record["counts"] == "full", path.name
        recorded.add(record["fault"])
    assert recorded == set(FAULTS) == {fault for promise in PROMISES for fault in promise.faults}
