"""`dtrain bench optimizer`: all cases do the same update, and the results become a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtrain.__main__ import main
from dtrain.config.tool_schema import OptimizerBenchConfig
from dtrain.errors import ConfigError
from dtrain.tools.bench.operations.optimizer import OptimizerPhase, _record
from dtrain.tools.bench.records import OperationResults, read_results
from dtrain.tools.bench.report.document import describe
from tests.helpers.oracle import assert_close_to_largest

CPU = torch.device("cpu")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compile)])
def test_end_to_end(compiled: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench.numel=5000", "bench.rounds=2", f"bench.compiled={compiled}".lower(), "bench.device=cpu"]
    arguments.append("bench.optimizers=[sgd,adamw]")
    threads = torch.get_num_threads()
    try:
        assert main(["bench", "optimizer", *arguments, f"bench.out={tmp_path / 'r.json'}"]) == 0
    finally:
        torch.set_num_threads(threads)
    results = read_results(tmp_path / "r.json")
    assert isinstance(results, OperationResults)
    assert results.config["bench"]["numel"] == 5000
    by_name = {timing.case: timing for timing in results.timings if timing.workload == "adamw, 8 bytes"}
    assert len(results.timings) == 2 * len(by_name)
    assert by_name["dtrain, blocked"].nbytes == 4096 * 34
    assert ("dtrain, compiled" in by_name) == compiled
    assert all(len(timing.ms) == 2 for timing in results.timings)
    assert {results.reference, *results.baselines} <= by_name.keys()
    assert capsys.readouterr().out.strip() == describe(results).markdown()
    (tmp_path / "doc.md").write_text("# Title\n")
    assert main(["bench", "report", str(tmp_path / "r.json"), f"bench.docs={tmp_path / 'doc.md'}"]) == 0
    assert describe(results).summary() in (tmp_path / "doc.md").read_text()


@pytest.mark.parametrize("case", ["torch, FP32 grads", "torch, BF16 grads", "torch foreach, BF16 grads"])
@pytest.mark.parametrize("optimizer", [name for name in OptimizerBenchConfig().optimizers if name != "muon"])
def test_all_cases_do_the_same_update(case: str, optimizer: str) -> None:
    record = replace(_record(optimizer), lr=0.1)
    phase, baseline = OptimizerPhase(2048, CPU, record), OptimizerPhase(2048, CPU, record)
    operations = baseline.operations(compiled=False)
    if case not in operations:
        pytest.skip("torch has no Lion, and the baseline is one loop")
    before = phase.master.clone()
    phase.operations(compiled=False)["dtrain, blocked"].run()
    operations[case].run()
    # BF16 gradients have eight bits
    assert_close_to_largest(phase.master - before, baseline.master - before, 5e-3)
    assert torch.equal(baseline.replica, baseline.master.bfloat16())


@pytest.mark.parametrize(("name", "message"), [("adm", "did you mean 'adam'"), ("torch", "is not one of adamw, ")])
def test_other_optimizers_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _record(name)
