"""`dtrain bench collectives`: real ranks at tiny sizes, over both transports."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.__main__ import main
from dtrain.config.tool_schema import CollectivesBenchConfig, CollectivesSuiteConfig
from dtrain.errors import RankError
from dtrain.tools import ranks as processes
from dtrain.tools.bench.operations.collectives import run_collectives_suite
from dtrain.tools.bench.records import OperationResults, read_results
from dtrain.tools.bench.report.document import describe

OPERATIONS = ("all_gather BF16", "all_to_all BF16, sum FP32", "reduce_scatter FP32", "all_reduce FP32")


@pytest.mark.processes
def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench.sizes=[2048,5000]", "bench.rounds=2", "bench.device=cpu", f"bench.out={tmp_path / 'r.json'}"]
    assert main(["bench", "collectives", *arguments]) == 0
    results = read_results(tmp_path / "r.json")
    assert isinstance(results, OperationResults)
    assert {timing.workload for timing in results.timings} == {
        f"{name}, {size}" for name in OPERATIONS for size in ("2,048", "4,096")
    }
    assert {timing.case for timing in results.timings} >= {"sockets"}
    assert all(len(timing.ms) == 2 and min(timing.ms) > 0 for timing in results.timings)
    received = {timing.workload: timing.nbytes for timing in results.timings if timing.case == "sockets"}
    assert [received[f"{name}, 4,096"] for name in OPERATIONS] == [4096, 4096, 8192, 16384]
    assert capsys.readouterr().out.strip() == describe(results).markdown()


@pytest.mark.processes
def test_a_rank_that_fails_is_named_with_its_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dtrain").mkdir()
    (tmp_path / "dtrain/__init__.py").write_text("raise SystemExit('not this time')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "environment", lambda threads: {"PYTHONPATH": str(tmp_path)})
    with pytest.raises(RankError, match=r"rank [01] ended with exit code 1: not this time"):
        run_collectives_suite(CollectivesSuiteConfig(CollectivesBenchConfig(device="cpu")), "command")
