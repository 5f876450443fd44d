"""`dtrain bench optimizer`: its contenders do the same update, its results survive JSON and become a table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dtrain.__main__ import main
from dtrain.cli.resolve import read_suite
from dtrain.config.commands import BENCH_OPTIMIZER
from dtrain.config.tool_schema import OptimizerBenchConfig
from dtrain.tools.bench.operations.optimizer import OptimizerPhase
from dtrain.tools.bench.operations.timing import Operation, take_turns
from dtrain.tools.bench.records import Timing, Timings, read_results, write_results
from dtrain.tools.bench.report.document import describe
from tests.helpers.oracle import assert_close_to_largest

CPU = torch.device("cpu")


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench.numel=5000", "bench.rounds=2", "bench.compiled=false", "bench.device=cpu"]
    threads = torch.get_num_threads()
    try:
        assert main(["bench", "optimizer", *words, f"bench.out={tmp_path / 'r.json'}"]) == 0
    finally:
        torch.set_num_threads(threads)
    results = read_results(tmp_path / "r.json")
    assert isinstance(results, Timings)
    assert results.config["bench"]["numel"] == 5000
    by_name = {timing.contender: timing for timing in results.timings}
    assert by_name["ours, blocked"].nbytes == 4096 * 34
    assert all(len(timing.ms) == 2 for timing in results.timings)
    assert {results.bandwidth, *results.rivals} <= by_name.keys()
    assert capsys.readouterr().out.strip() == describe(results)
    (tmp_path / "doc.md").write_text("# Title\n")
    assert main(["bench", "report", str(tmp_path / "r.json"), f"bench.docs={tmp_path / 'doc.md'}"]) == 0
    assert describe(results) in (tmp_path / "doc.md").read_text()


@pytest.mark.parametrize("name", ["torch fused, FP32 grads", "torch foreach, FP32 grads", "torch fused, BF16 grads"])
def test_all_contenders_do_the_same_update(name: str) -> None:
    phase, rival = OptimizerPhase(2048, CPU), OptimizerPhase(2048, CPU)
    before = phase.master.clone()
    phase.operations(compiled=False)["ours, blocked"].run()
    rival.operations(compiled=False)[name].run()
    # the first step of Adam has the size of the learning rate whatever the gradient, so rounding it changes little
    assert_close_to_largest(phase.master - before, rival.master - before, 1e-3)
    assert torch.equal(rival.replica, rival.master.bfloat16())


def test_turns_interleave_and_the_first_does_not_count() -> None:
    calls: list[str] = []
    operations = {name: Operation(lambda name=name: calls.append(name), 8) for name in "ab"}
    timings = take_turns(operations, 2, CPU)
    assert calls == list("ababab")
    assert [(timing.contender, timing.nbytes, len(timing.ms)) for timing in timings] == [("a", 8, 2), ("b", 8, 2)]


@pytest.mark.compile
def test_the_table_compares_round_by_round(tmp_path: Path) -> None:
    assert main(["bench", "optimizer", "bench.numel=1024", "bench.rounds=1", f"bench.out={tmp_path / 'r.json'}"]) == 0
    real = read_results(tmp_path / "r.json")
    assert isinstance(real, Timings)
    timings = [Timing("triad", 12_000_000, [1.0, 2.0]), Timing("ours", 24_000_000, [2.0, 2.0])]
    made = Timings(**{**vars(real), "timings": timings, "bandwidth": "triad", "rivals": ["triad"]})
    write_results(tmp_path / "made.json", made)
    assert read_results(tmp_path / "made.json") == made
    row = next(line for line in describe(made).splitlines() if line.startswith("| ours"))
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        "ours",
        "2.00 (2.00 to 2.00)",
        "12.0",
        "1.50 (1.00 to 2.00)",
        "0.75 (0.50 to 1.00)",
    ]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("bench.numl=3", "unknown key 'bench.numl'; did you mean 'bench.numel'?"),
        ("bench.numel=3", "bench.numel=3 is too small; it must be at least 1024"),
        ("model=tiny", "no group 'model' to override; valid: bench"),
        ("bench.out=''", "bench.out is empty"),
    ],
)
def test_mistakes_are_one_line(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "optimizer", word]) == 2
    assert message in capsys.readouterr().err


def test_the_default_configuration() -> None:
    config = read_suite([], BENCH_OPTIMIZER)
    assert config is not None
    assert config.bench == OptimizerBenchConfig()
