"""`dtrain bench report`, and the document that it writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dtrain.__main__ import main
from dtrain.tools.bench.records import read_results, write_results
from dtrain.tools.bench.report.document import describe, update_document
from tests.unit.tools.bench.made import result, results_of

ROOT = Path(__file__).parents[5]
RESULTS = sorted((ROOT / "docs/results").glob("*.json"))


def test_report_writes_between_the_markers_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        write_results(tmp_path / f"{name}.json", results_of([result(f"plain-{name}", 1, [[1.0]], engine="plain")]))
    document = tmp_path / "doc.md"
    document.write_text("# Title\n\nbefore \\1\n<!-- results one -->\nstale\n<!-- end one -->\nafter\n")
    assert main(["bench", "report", "one.json", "two.json", "bench.docs=doc.md"]) == 0
    text = document.read_text()
    assert text.startswith("# Title\n\nbefore \\1\n<!-- results one -->\n")
    assert "stale" not in text
    assert text.index("plain-one") < text.index("after\n") < text.index("## two") < text.index("plain-two")
    assert main(["bench", "report", "one.json", "two.json", "bench.docs=doc.md"]) == 0
    assert document.read_text() == text
    assert main(["bench", "report", "one.json"]) == 1  # docs/ does not exist here
    assert capsys.readouterr().err == "dtrain: docs is not a folder; set bench.docs=PATH to the document to write\n"
    document.write_text("<!-- end one --><!-- results one -->")
    assert main(["bench", "report", "one.json", "bench.docs=doc.md"]) == 1
    assert "restore the marker" in capsys.readouterr().err
    update_document(tmp_path / "new.md", {})
    assert (tmp_path / "new.md").read_text() == "# Benchmarks\n"


def test_document_shows_what_its_results_files_hold(tmp_path: Path) -> None:
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert set(re.findall("<!-- results (.*?) -->", text)) == {path.stem for path in RESULTS}
    copy = tmp_path / "benchmarks.md"
    copy.write_text(text, encoding="utf-8")
    update_document(copy, {path.stem: read_results(path) for path in RESULTS})
    assert copy.read_text(encoding="utf-8") == text, "run `dtrain bench report docs/results/*.json`"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_files_name_the_command_that_wrote_them(path: Path) -> None:
    results = read_results(path)
    assert results.command.startswith(f"dtrain bench {results.suite} ")
    assert f"bench.out=docs/results/{path.name}" in results.command
    assert all(table.rows for table in describe(results).tables)
