"""`dtrain bench optimizer`: all cases do the same update, and the results become a table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dtrain.__main__ import main
from dtrain.tools.bench.operations.optimizer import OptimizerPhase
from dtrain.tools.bench.records import OperationResults, read_results
from dtrain.tools.bench.report.document import describe
from tests.helpers.oracle import assert_close_to_largest

CPU = torch.device("cpu")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compile)])
def test_end_to_end(compiled: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench.numel=5000", "bench.rounds=2", f"bench.compiled={compiled}".lower(), "bench.device=cpu"]
    threads = torch.get_num_threads()
    try:
        assert main(["bench", "optimizer", *arguments, f"bench.out={tmp_path / 'r.json'}"]) == 0
    finally:
        torch.set_num_threads(threads)
    results = read_results(tmp_path / "r.json")
    assert isinstance(results, OperationResults)
    assert results.config["bench"]["numel"] == 5000
    by_name = {timing.case: timing for timing in results.timings}
    assert by_name["dtrain, blocked"].nbytes == 4096 * 34
    assert ("dtrain, compiled" in by_name) == compiled
    assert all(len(timing.ms) == 2 for timing in results.timings)
    assert {results.reference, *results.baselines} <= by_name.keys()
    assert capsys.readouterr().out.strip() == describe(results).markdown()
    (tmp_path / "doc.md").write_text("# Title\n")
    assert main(["bench", "report", str(tmp_path / "r.json"), f"bench.docs={tmp_path / 'doc.md'}"]) == 0
    assert describe(results).summary() in (tmp_path / "doc.md").read_text()


@pytest.mark.parametrize("name", ["torch fused, FP32 grads", "torch foreach, FP32 grads", "torch fused, BF16 grads"])
def test_all_cases_do_the_same_update(name: str) -> None:
    phase, baseline = OptimizerPhase(2048, CPU), OptimizerPhase(2048, CPU)
    before = phase.master.clone()
    phase.operations(compiled=False)["dtrain, blocked"].run()
    baseline.operations(compiled=False)[name].run()
    # The first step of Adam is as large as the learning rate whatever the gradient, so rounding changes it little.
    assert_close_to_largest(phase.master - before, baseline.master - before, 1e-3)
    assert torch.equal(baseline.replica, baseline.master.bfloat16())
