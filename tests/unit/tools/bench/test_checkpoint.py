"""`dtrain bench checkpoint`: real ranks at a tiny size; all contenders save the same bytes; what its errors say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader as dcp

from dtrain.__main__ import main
from dtrain.checkpoint import open_newest
from dtrain.tools.bench.operations.checkpoint import State, contenders
from dtrain.tools.bench.records import Timings, read_results
from dtrain.tools.bench.report.document import describe
from tests.helpers.checkpoints import ALONE

NAMES = ["floor", "ours", "ours, asynchronous", "DCP save", "DCP async_save", "torch.save, fsync"]


@pytest.mark.processes
def test_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["bench.sizes=[1,2]", "bench.ranks=2", "bench.rounds=2", "bench.device=cpu", "bench.out=r.json"]
    assert main(["bench", "checkpoint", *words]) == 0
    results = read_results(tmp_path / "r.json")
    assert isinstance(results, Timings)
    cases = [f"{kind}, {size} MB" for size in (1, 2) for kind in ("stall", "total")]
    assert [(timing.case, timing.contender) for timing in results.timings] == [(c, n) for c in cases for n in NAMES]
    assert all(len(timing.ms) == 2 and min(timing.ms) > 0 for timing in results.timings)
    assert {round(timing.nbytes / 1e6) for timing in results.timings} == {1, 2}
    by_name = {(timing.case, timing.contender): timing.ms for timing in results.timings}
    for _, name in by_name:
        stalls, totals = by_name["stall, 1 MB", name], by_name["total, 1 MB", name]
        assert name == "floor" or all(stall <= total for stall, total in zip(stalls, totals, strict=True))
    assert capsys.readouterr().out.strip() == describe(results)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_every_contender_saves_the_whole_state(tmp_path: Path) -> None:
    state = State(ALONE, 100_000)
    expected = state.named()
    for name, turn in contenders(state).items():
        path = tmp_path / name
        path.mkdir()
        stalled, total = turn(path)
        assert total > 0
        assert name in ("floor",) or 0 < stalled <= total
    assert (tmp_path / "floor" / "0").read_bytes() == b"".join(t.numpy().tobytes() for t in expected.values())
    for name in ("ours", "ours, asynchronous"):
        reader = open_newest(tmp_path / name, ALONE)
        assert {f"{t.kind}.{t.name}.0" for t in reader.tensors} == expected.keys()
        assert all(torch.equal(reader.read(p.kind, p.name), p.data) for p in state.shards)
    for name in ("DCP save", "DCP async_save"):
        read = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
        dcp.load(read, checkpoint_id=tmp_path / name)
        assert all(torch.equal(read[key], tensor) for key, tensor in expected.items())
    read = torch.load(tmp_path / "torch.save, fsync" / "0.pt", weights_only=True)
    assert all(torch.equal(read[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("bench.sizes=[0]", "bench.sizes=[0] must be one or more numbers of MB, each at least 1"),
        ("bench.sizes=[]", "bench.sizes=[] must be one or more numbers"),
        ("bench.dir=/nowhere/at/all", "bench.dir=/nowhere/at/all: No such file or directory; name a folder"),
        ("bench.size=[1]", "unknown key 'bench.size'; did you mean 'bench.sizes'?"),
    ],
)
def test_mistakes_are_one_line(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "checkpoint", word]) == 2
    assert message in capsys.readouterr().err
