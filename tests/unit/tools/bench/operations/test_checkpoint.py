"""`dtrain bench checkpoint`: real ranks at a tiny size, and all cases save the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader as dcp

from dtrain.__main__ import main
from dtrain.checkpoint import open_newest
from dtrain.tools.bench.operations.checkpoint import State, save_cases
from dtrain.tools.bench.records import OperationResults, read_results
from dtrain.tools.bench.report.document import describe
from tests.helpers.checkpoints import ALONE

NAMES = ["lower bound", "dtrain", "dtrain, asynchronous", "DCP save", "DCP async_save", "torch.save, fsync"]


@pytest.mark.processes
def test_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["bench.sizes=[1,2]", "bench.ranks=2", "bench.rounds=2", "bench.device=cpu", "bench.out=r.json"]
    assert main(["bench", "checkpoint", *arguments]) == 0
    results = read_results(tmp_path / "r.json")
    assert isinstance(results, OperationResults)
    workloads = [f"{kind}, {size} MB" for size in (1, 2) for kind in ("stall", "total")]
    assert [(timing.workload, timing.case) for timing in results.timings] == [(w, n) for w in workloads for n in NAMES]
    assert all(len(timing.ms) == 2 and min(timing.ms) > 0 for timing in results.timings)
    assert {round(timing.nbytes / 1e6) for timing in results.timings} == {1, 2}
    by_name = {(timing.workload, timing.case): timing.ms for timing in results.timings}
    for _, name in by_name:
        stalls, totals = by_name["stall, 1 MB", name], by_name["total, 1 MB", name]
        assert name == "lower bound" or all(stall <= total for stall, total in zip(stalls, totals, strict=True))
    assert capsys.readouterr().out.strip() == describe(results).markdown()
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_every_case_saves_the_whole_state(tmp_path: Path) -> None:
    state = State(ALONE, 100_000)
    expected = state.named()
    for name, save in save_cases(state).items():
        path = tmp_path / name
        path.mkdir()
        stalled, total = save(path)
        assert total > 0
        assert name in ("lower bound",) or 0 < stalled <= total
    assert (tmp_path / "lower bound" / "0").read_bytes() == b"".join(t.numpy().tobytes() for t in expected.values())
    for name in ("dtrain", "dtrain, asynchronous"):
        reader = open_newest(tmp_path / name, ALONE)
        assert {f"{t.kind}.{t.name}.0" for t in reader.tensors} == expected.keys()
        assert all(torch.equal(reader.read(p.kind, p.name), p.data) for p in state.shards)
    for name in ("DCP save", "DCP async_save"):
        read = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
        dcp.load(read, checkpoint_id=tmp_path / name)
        assert all(torch.equal(read[key], tensor) for key, tensor in expected.items())
    read = torch.load(tmp_path / "torch.save, fsync" / "0.pt", weights_only=True)
    assert all(torch.equal(read[key], tensor) for key, tensor in expected.items())
