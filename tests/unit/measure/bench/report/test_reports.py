from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from dtrain.__main__ import main
from dtrain.errors import ConfigError
from dtrain.measure.bench.records import TrainingResults, read_results
from dtrain.measure.bench.report.document import describe, update_document
from dtrain.measure.bench.report.overhead import median_interval, meets_target
from dtrain.measure.bench.report.training import has_wrong_loss
from dtrain.measure.record import write_record
from tests.unit.measure.bench.made import result, results_of

ROOT = Path(__file__).parents[5]
RESULTS = sorted((ROOT / "docs/results").glob("*.json"))


def test_report_writes_between_the_markers_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        write_record(tmp_path / f"{name}.json", results_of([result(f"plain-{name}", 1, [[1.0]], engine="plain")]))
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


def test_document_shows_what_its_results_files_hold(tmp_path: Path) -> None:
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert set(re.findall("<!-- results (.*?) -->", text)) == {path.stem for path in RESULTS}
    copy = tmp_path / "benchmarks.md"
    copy.write_text(text, encoding="utf-8")
    found = {path.stem: read_results(path) for path in RESULTS}
    update_document(copy, found)
    assert copy.read_text(encoding="utf-8") == text, "run `dtrain bench report docs/results/*.json`"
    for name, results in found.items():
        assert results.command.startswith(f"dtrain bench {results.suite} ")
        assert f"bench.out=docs/results/{name}.json" in results.command
    update_document(tmp_path / "new.md", {})
    assert (tmp_path / "new.md").read_text() == "# Benchmarks\n"


def test_files_that_are_no_results_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_record(path, results_of([result("plain", 1, [[1.0]], [float("nan")], "plain")]))
    read = read_results(path)
    assert isinstance(read, TrainingResults)
    assert read.cases[0].rounds[0].losses == [None]
    good = json.loads(path.read_text())
    for damage in (
        {**good, "tokens_per_rank": {}, "cases": 1},
        {key: value for key, value in good.items() if key != "host"},
        [],
        3,
    ):
        path.write_text(json.dumps(damage))
        with pytest.raises(ConfigError, match=r"r\.json is no results file"):
            read_results(path)
    with pytest.raises(ConfigError, match=r"absent\.json is no results file"):
        read_results(tmp_path / "absent.json")


@pytest.mark.parametrize(("loss", "wrong"), [(2.03, False), (1.97, False), (2.05, True), (1.5, True), (None, True)])
def test_a_case_with_another_loss_is_marked_wrong(loss: float | None, wrong: bool) -> None:
    cases = [result("plain", 1, [[1.0]], [2.0], "plain"), result("ddp", 2, [[1.0]], [9.0], "ddp")]
    cases.append(result("native", 1, [[1.0]], [loss]))
    assert [has_wrong_loss(item, cases) for item in cases] == [False, False, wrong]
    table = describe(results_of(cases)).tables[0]
    assert [cells[0] for cells in table.rows if "WRONG" in cells[-1]] == ["native"] * wrong


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.0, 1.01, 1.0, 1.0, 1.02, 1.0], "yes"),
        ([1.0, 1.01, 1.0, 1.0, 1.021, 1.0], "open"),
        ([1.3, 1.021, 1.1, 1.1, 1.1, 1.1], "no"),
        ([1.3, 1.019, 1.1, 1.1, 1.1, 1.1], "open"),
        ([1.0] * 5, "too few rounds"),
        ([1.0] * 8 + [1.5], "yes"),  # from nine rounds on, one may be an outlier
        ([1.0] * 7 + [1.5], "open"),
    ],
)
def test_the_target_is_met_or_missed_only_beyond_noise(ratios: list[float], expected: str) -> None:
    assert meets_target(ratios) == expected


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    assert median_interval([3.0, 1.0, 2.0, 9.0, 5.0, 4.0, 8.0, 7.0, 6.0]) == (2.0, 8.0)
    true_median = 2**0.5  # a Pareto distribution: skewed, with outliers
    for count in (6, 9, 25):
        draw, held = random.Random(count), 0
        for _ in range(2000):
            interval = median_interval([draw.paretovariate(2) for _ in range(count)])
            assert interval is not None
            held += interval[0] <= true_median <= interval[1]
        assert 0.94 < held / 2000 < 0.99
