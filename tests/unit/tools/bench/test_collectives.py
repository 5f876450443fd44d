"""`dtrain bench collectives`: real ranks at tiny sizes, both ways, and what its errors say."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.__main__ import main
from dtrain.config.tool_schema import CollectivesBenchConfig, CollectivesSuiteConfig
from dtrain.errors import RankError
from dtrain.tools import ranks as processes
from dtrain.tools.bench.operations.collectives import run_collectives_suite
from dtrain.tools.bench.records import Timings, read_results
from dtrain.tools.bench.report.document import describe

OPERATIONS = ("all_gather BF16", "exchange BF16, sum FP32", "reduce_scatter FP32", "all_reduce FP32")


@pytest.mark.processes
def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench.sizes=[2048,5000]", "bench.rounds=2", "bench.device=cpu", f"bench.out={tmp_path / 'r.json'}"]
    assert main(["bench", "collectives", *words]) == 0
    results = read_results(tmp_path / "r.json")
    assert isinstance(results, Timings)
    assert {timing.case for timing in results.timings} == {
        f"{name}, {size}" for name in OPERATIONS for size in ("2,048", "4,096")
    }
    assert {timing.contender for timing in results.timings} >= {"sockets"}
    assert all(len(timing.ms) == 2 and min(timing.ms) > 0 for timing in results.timings)
    received = {timing.case: timing.nbytes for timing in results.timings if timing.contender == "sockets"}
    assert [received[f"{name}, 4,096"] for name in OPERATIONS] == [4096, 4096, 8192, 16384]
    assert capsys.readouterr().out.strip() == describe(results)


@pytest.mark.processes
def test_a_rank_that_fails_is_named_with_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dtrain").mkdir()
    (tmp_path / "dtrain/__init__.py").write_text("raise SystemExit('not this time')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "environment", lambda threads: {"PYTHONPATH": str(tmp_path)})
    with pytest.raises(RankError, match=r"rank [01] ended with exit code 1: not this time"):
        run_collectives_suite(CollectivesSuiteConfig(CollectivesBenchConfig(device="cpu")), "command")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("bench.sizes=[100]", "bench.sizes=[100] must be one or more numbers, each at least 2048"),
        ("bench.sizes=[]", "bench.sizes=[] must be one or more numbers"),
        ("bench.ranks=1", "bench.ranks=1 is too small; it must be at least 2"),
        ("bench.size=[1]", "unknown key 'bench.size'; did you mean 'bench.sizes'?"),
    ],
)
def test_mistakes_are_one_line(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "collectives", word]) == 2
    assert message in capsys.readouterr().err
