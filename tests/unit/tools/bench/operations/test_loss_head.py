"""`dtrain bench loss-head`: all cases compute one loss and its gradients, and the results become a table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dtrain.__main__ import main
from dtrain.config.tool_schema import LossHeadBenchConfig
from dtrain.tools.bench.operations.loss_head import _Head
from dtrain.tools.bench.records import OperationResults, read_results
from dtrain.tools.bench.report.document import describe
from tests.helpers.oracle import normwise_error


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench.tokens=64", "bench.hidden_dim=16", "bench.vocab_size=200", "bench.rounds=2"]
    threads = torch.get_num_threads()
    try:
        out = f"bench.out={tmp_path / 'r.json'}"
        assert main(["bench", "loss-head", *arguments, "bench.compiled=false", "bench.device=cpu", out]) == 0
    finally:
        torch.set_num_threads(threads)
    results = read_results(tmp_path / "r.json")
    assert isinstance(results, OperationResults)
    assert {(timing.workload, timing.case) for timing in results.timings} >= {
        ("fp32", "full logits"),
        ("fp32", "dtrain, 128 rows"),
    }
    assert all(timing.flops == 6 * 64 * 16 * 200 and len(timing.ms) == 2 for timing in results.timings)
    assert "fp32: full logits 3" in results.description, "three copies of the logits"
    assert capsys.readouterr().out.strip() == describe(results).markdown()


def test_all_cases_compute_the_same() -> None:
    head = _Head.of(LossHeadBenchConfig(tokens=64, hidden_dim=16, vocab_size=200), torch.float32, torch.device("cpu"))
    found = []
    for run in head.cases(compiled=False).values():
        run()
        assert head.hidden.grad is not None
        assert head.weight.grad is not None
        found.append(torch.cat([head.hidden.grad.flatten(), head.weight.grad.flatten()]))
    assert len(found) >= 2
    assert all(normwise_error(grads, found[0]) < 1e-5 for grads in found)
