"""`dtrain bench optimizer bench.optimizers=[muon]`: both sides do the same update, and the results become a report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dtrain.__main__ import main
from dtrain.config.optim import Muon
from dtrain.optim.muon import MuonRule
from dtrain.tools.bench.operations.muon import MuonPhase, gpt_blocks, sent_share
from dtrain.tools.bench.records import OperationResults, read_results
from dtrain.tools.bench.report.document import describe
from tests.helpers.oracle import assert_close_to_largest

CPU = torch.device("cpu")
RECORD = Muon(lr=0.1)


def test_end_to_end(tmp_path: Path) -> None:
    arguments = ["bench.numel=5000", "bench.rounds=2", "bench.compiled=false", "bench.device=cpu"]
    arguments.append("bench.optimizers=[sgd,muon]")
    threads = torch.get_num_threads()
    try:
        assert main(["bench", "optimizer", *arguments, f"bench.out={tmp_path / 'r.json'}"]) == 0
    finally:
        torch.set_num_threads(threads)
    results = read_results(tmp_path / "r.json")
    assert isinstance(results, OperationResults)
    own = [timing for timing in results.timings if timing.workload == "muon, 4 bytes"]
    assert [timing.case for timing in own] == ["torch, BF16 grads", "dtrain"]
    cubes = 3 * 4 + 1 * 4 + 2 * 4 * 4 + 4 * 2  # of [3d, d], [d, d], [4d, d] and [d, 4d]: 4 m^2 n + 2 m^3 in d^3
    assert {(timing.nbytes, timing.flops) for timing in own} == {(0, 5 * cubes * 64**3)}
    assert all(len(timing.ms) == 2 for timing in own)
    assert [one.ranks for one in results.traffic] == [2, 4, 8, 64]
    assert all(0 < one.bytes_per_parameter <= one.bound == 4 for one in results.traffic)
    (table,) = describe(results).tables
    by_case = {row[:2]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert not by_case["muon, 4 bytes", "dtrain"]["GB/s / triad"]
    assert not by_case["muon, 4 bytes", "dtrain"]["GB/s"]
    assert float(by_case["muon, 4 bytes", "dtrain"]["TFLOP/s"]) > 0
    assert not by_case["sgd, 4 bytes", "dtrain, blocked"]["TFLOP/s"]
    (tmp_path / "doc.md").write_text("# Title\n")
    assert main(["bench", "report", str(tmp_path / "r.json"), f"bench.docs={tmp_path / 'doc.md'}"]) == 0
    document = (tmp_path / "doc.md").read_text()
    assert "a GPT of 1 block and hidden dim 64 (49,152 elements)" in document
    assert "2.33 on 2 ranks" in document
    assert "at most 4 on any number" in document


def stepped(side: str, norm: float) -> MuonPhase:
    phase = MuonPhase(1, CPU, RECORD, norm)
    run = phase.dtrain_step() if side == "dtrain" else phase.torch_sequence(phase.torch_optimizer())
    for _ in range(2):
        run()
    return phase


def test_both_sides_end_with_equal_masters() -> None:
    own, baseline = stepped("dtrain", 0.5), stepped("torch", 0.5)
    assert not torch.equal(own.master, MuonPhase(1, CPU, RECORD).master)
    assert torch.equal(own.master, baseline.master)
    assert torch.equal(own.replica, baseline.replica)
    assert torch.equal(own.replica, own.master.bfloat16())


def test_both_sides_clip() -> None:
    own, baseline = MuonPhase(1, CPU, RECORD, 4.0), MuonPhase(1, CPU, RECORD, 4.0)
    own.dtrain_step()()
    optimizer = baseline.torch_optimizer()
    baseline.torch_sequence(optimizer)()
    want = torch.cat([state["momentum_buffer"].view(-1) for state in optimizer.state.values()])
    assert_close_to_largest(own.momentum, want, 1e-5)


@pytest.mark.parametrize(("numel", "count"), [(1, 1), (10_000_000, 6), (85_000_000, 12)])
def test_matrices_are_about_numel(numel: int, count: int) -> None:
    blocks = gpt_blocks(numel)
    assert len(blocks) == count
    assert blocks[-1][f"{count - 1}.up"] == (256 * count, 64 * count)


def test_traffic_is_what_the_owners_do_not_hold() -> None:
    rule = MuonRule(RECORD, {})
    blocks = gpt_blocks(1)
    # rank 0 holds qkv, proj and half of up; by cost it owns down and qkv
    assert sent_share(blocks, 2, rule) == (4096 + 8192 + 16384) / 49152
    assert sent_share(blocks, 1, rule) == 0
