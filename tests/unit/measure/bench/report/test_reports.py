from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from dtrain.__main__ import main
from dtrain.config.commands import SUITES
from dtrain.errors import ConfigError
from dtrain.measure.bench.records import BenchmarkCase, CaseResult, TrainingResults, read_results
from dtrain.measure.bench.report.document import describe, update_document
from dtrain.measure.bench.report.overhead import median_interval, meets_target
from dtrain.measure.bench.report.training import has_wrong_loss
from dtrain.measure.record import write_record
from tests.helpers.speed_ups import PAGE, TABLE, speed_ups
from tests.unit.measure.bench.made import HOST, case_result, result, results_of, row

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
    assert (
        capsys.readouterr().err
        == "dtrain: docs/results is not a folder; set bench.docs=PATH to the document to write\n"
    )
    document.write_text("<!-- end one --><!-- results one -->")
    assert main(["bench", "report", "one.json", "bench.docs=doc.md"]) == 1
    assert "restore the marker" in capsys.readouterr().err


def test_document_shows_what_its_results_files_hold(tmp_path: Path) -> None:
    text = (ROOT / "docs/results/benchmarks.md").read_text(encoding="utf-8")
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


def test_document_lists_the_suites() -> None:
    text, results = ((ROOT / f"docs/{folder}/benchmarks.md").read_text("utf-8") for folder in ("trust", "results"))
    rows = re.findall(r"^(\| \[`.*`\]\(../results/.*\) \| .* \|) .* \|$", text, re.MULTILINE)
    assert rows == [
        f"| [`{name}`](../results/benchmarks.md#{name}) | {suite.measures} |" for name, suite in SUITES.items()
    ]
    assert [name for name in SUITES if f"\n## {name}\n" not in results] == []


def test_the_table_of_speed_ups_is_that_of_the_stored_results() -> None:
    found = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == speed_ups(), "run `python -m tests.helpers.speed_ups`"


def test_the_example_of_a_suite_is_its_code() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Measure something new\n")[1]
    blocks = re.findall(r"```python\n(.*?)\n```", section.split("\n## ")[0], re.DOTALL)
    sources = (
        "config/commands",
        "config/tool_schema",
        "measure/bench/training/suites",
        "measure/bench/training/suites",
    )
    for block, source in zip(blocks, sources, strict=True):
        text = (ROOT / f"dtrain/{source}.py").read_text(encoding="utf-8")
        assert block in text or indent(block, " " * 8) in text, f"{source}.py has changed"


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


H100 = "NVIDIA H100 80GB HBM3"


def step(name: str, ms: float, loss: float = 2.0, **facts: Any) -> CaseResult:
    made = case_result(BenchmarkCase(name, "native", 1, "bf16", 2), [[ms]] * 2, [loss])
    footprint = replace(made.footprint, device=H100, num_parameters=int(1.24e9), **facts)
    return replace(made, footprint=footprint, micro_batch=2)


def test_the_column_of_targets_judges_an_80_gb_gpu_only() -> None:
    flops = {"flops_causal": 8e9, "flops_full": 9e9}
    cases = [step("dtrain", 60.0, **flops), step("fsdp2", 65.0), step("tensorwise", 50.0, 2.01), step("eager", 90.0)]
    results = results_of(cases, "step")
    keys = {"micro_batch_size": 2, "data": "device", "resident": False, "attempts": 0, "window_steps": 6}
    results = replace(results, config={"bench": {**results.config["bench"], **keys}, "model": {"max_seq_len": 4096}})
    table = describe(results).tables[0]
    assert "target" not in table.columns
    assert row(table, "dtrain")["W, MHz, °C"] == "unknown, unknown, unknown"
    judged = describe(replace(results, host=replace(HOST, gpus=[H100])))
    cells = {name: row(judged.tables[0], name)["target"] for name in ("dtrain", "tensorwise", "eager")}
    states = "states over the formula at most 1.02: met"
    assert cells["dtrain"] == f"MFU at least 50%: met; speed over fsdp2 at least 1.10: NOT MET; {states}"
    fast = "speed over dtrain at least 1.18: met; loss from dtrain's within 0.25%: NOT MET"
    assert cells["tensorwise"] == f"{fast}; {states}"
    assert cells["eager"] == states
    assert judged.conclusions[2].startswith("tensorwise: 50.0 ms a step of 2")
    assert "1.200 x dtrain" in judged.conclusions[2]


def test_a_table_says_what_a_case_out_of_memory_took() -> None:
    cases = [result("plain", 1, [[2.0]], engine="plain"), result("native", 1, [[2.0]])]
    results = results_of([replace(cases[0], micro_batch=4), replace(cases[1], micro_batch=2)])
    results.config["bench"]["micro_batch_size"] = 4
    steps, details = describe(results).tables
    assert row(steps, "native, 2 sequences")["step / plain"] == "2.000 (2.000 to 2.000)", "of a sequence"
    assert [row(details, name)["tokens/s"] for name in ("plain", "native")] == ["64k", "32k"]


def test_a_reproducible_case_has_its_price() -> None:
    plain, other, own = (result(name, 1, [[2.0]]) for name in ("native", "another stage", "native, reproducible"))
    other = replace(other, case=replace(other.case, zero_stage=3))
    own = replace(own, case=replace(own.case, reproducible=True), rounds=[replace(own.rounds[0], step_ms=[2.5])])
    assert "step / not reproducible" not in describe(results_of([plain, other])).tables[0].columns
    steps = describe(results_of([other, plain, own])).tables[0]
    cells = [
        row(steps, name)["step / not reproducible"] for name in ("another stage", "native", "native, reproducible")
    ]
    assert cells == ["", "", "1.250 (1.250 to 1.250)"]


def test_a_run_that_was_ended_is_reported() -> None:
    begun = replace(result("native", 1, [[2.0]]), rounds=[])
    assert [cells[0] for cells in describe(results_of([begun])).tables[0].rows] == []
    cases = [result("plain", 1, [[1.0], [2.0]], engine="plain"), result("native", 1, [[2.0]]), begun]
    steps = describe(results_of(cases)).tables[0]
    assert row(steps, "native")["step / plain"] == "2.000 (2.000 to 2.000)"
