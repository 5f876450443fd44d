"""The documents are true: their code blocks run, and the links and paths in them exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.promises import FAULTS, FAULTS_OF, RESULTS, ROOT, in_page, promise_table, rows

PAGES = sorted(page for glob in ("", "docs/", "docs/*/", "docs/results/*/") for page in ROOT.glob(f"{glob}*.md"))
GUIDES = [page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name != "decisions"]
# Decision records and the change log name files as they were at the time.
_PATH = re.compile(r"(?<![\w./<{-])((?:dtrain|tests|docs|conf|launch|\.ci)/[\w./-]*\w)(?![\w*<{…]|/?[*<{]|\.\.\.)")


@pytest.mark.parametrize("page", ["README.md", "docs/start/library.md", "docs/run/optimizers.md"])
def test_code_blocks_run(page: str) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL))
    assert "dtrain.initialize" in code
    exec(compile(code, page, "exec"), {"__name__": page})  # noqa: S102 - the documents are ours


def anchors(page: Path) -> set[str]:
    """What a link to a heading of ``page`` may name, as GitHub forms it."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_linked_files_and_headings_exist() -> None:
    for page in PAGES:
        for target, _, anchor in re.findall(r"\]\(([^)#\s]*)(#([^)]+))?\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http://", "https://")):
                linked = page.parent / target if target else page
                assert linked.exists(), f"{page.name} links to {target}"
                assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}#{anchor}"


def test_named_paths_exist() -> None:
    named = [(page.name, path) for page in GUIDES for path in _PATH.findall(page.read_text(encoding="utf-8"))]
    assert not [(page, path) for page, path in named if not (ROOT / path).exists() and "NNNN" not in path]


def test_the_page_has_the_recorded_figures() -> None:
    assert in_page()[0] == promise_table(), "python -m tests.helpers.promises"


def test_each_promise_names_tests_that_exist() -> None:
    assert [*rows()] == [*FAULTS_OF] == [f"P{number}" for number in range(1, 17)]
    for promise, tests, _ in rows().values():
        names = re.findall(r"`(tests/\w+/[\w/]+\.py)`", tests)
        assert names == tests.replace("`", "").split("<br>"), promise
        assert all((ROOT / name).exists() for name in names), promise


def test_every_fault_has_a_promise_and_the_record_of_a_full_run() -> None:
    recorded = set()
    for path in RESULTS.glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record["counts"] == "full", path.name
        recorded.add(record["fault"])
    assert recorded == set(FAULTS) == {*" ".join(FAULTS_OF.values()).split()}
