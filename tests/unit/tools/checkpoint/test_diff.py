from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain.checkpoint import Snapshot, save
from dtrain.checkpoint.format.checked_file import DamageError
from dtrain.checkpoint.reader import CheckpointReader
from dtrain.distributed.communicator import Communicator
from dtrain.errors import CheckpointError
from dtrain.tools.checkpoint import diff
from dtrain.tools.checkpoint.cli import main
from dtrain.tools.checkpoint.diff import diff as compare
from tests.helpers.checkpoints import Tensors, make_tensors, on_threads, shards_of
from tests.helpers.damage import R1, flip

Pair = tuple[Path, dict[tuple[str, str], Tensor]]
STATE = {"engine": "native", "world_size": 2, "config": {"optim": {"lr": 0.1}}, "extra": {}}


def write(directory: Path, tensors: Tensors, world: int = 2, step: int = 5, **state: Any) -> Path:
    def work(comm: Communicator) -> Path:
        snapshot = Snapshot(step, shards_of(tensors, comm.rank, world), {**STATE, "world_size": world, **state})
        return save(directory, snapshot, comm)

    results = on_threads(world, work)
    assert all(isinstance(result, Path) for result in results), results
    return results[0]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """A run with one checkpoint, and a copy of its tensors to change."""
    write(tmp_path / "a" / "checkpoints", make_tensors(1))
    return tmp_path, make_tensors(1)


def test_equal_tensors_are_equal_at_another_world_size_and_without_being_read(pair: Pair, monkeypatch: Any) -> None:
    path, tensors = pair
    write(path / "b", tensors, world=3, engine="fsdp2")
    whole = compare(path / "a", path / "b", every_byte=True)
    assert (whole.num_compared, whole.num_read) == (len(tensors), len(tensors))
    monkeypatch.setattr(CheckpointReader, "read", None)
    found = compare(path / "a", path / "b")
    assert found.tensors_equal
    assert whole.tensors_equal
    assert (found.num_compared, found.num_read) == (len(tensors), 0)
    changes = [(item.path, item.a, item.b) for item in found.state]
    assert changes == [("engine", "native", "fsdp2"), ("world_size", 2, 3)]


def test_differing_values_are_measured(pair: Pair, monkeypatch: Any) -> None:
    path, tensors = pair
    before = tensors["master", "weight"].clone()
    changed = tensors["master", "weight"].view(-1)
    changed[13] += 0.5
    changed[30] *= 3
    tensors["buffer", "num_batches"] += 4
    write(path / "b", tensors)
    monkeypatch.setattr(diff, "_BLOCK_ELEMENTS", 8)
    found = compare(path / "a", path / "b")
    count, weight = found.values
    assert (count.label, count.num_different, count.max_abs) == ("buffer:num_batches", 1, 4.0)
    distance, after = (before - tensors["master", "weight"]).double(), tensors["master", "weight"].double()
    assert (weight.label, weight.numel, weight.num_different, weight.first) == ("master:weight", 35, 2, 13)
    assert weight.max_abs == distance.abs().max()
    assert weight.max_rel == pytest.approx((distance / after).abs().max().item())
    assert weight.normwise == pytest.approx((distance.norm() / after.norm()).item())
    assert (found.num_read, found.tensors_equal) == (2, False)


@pytest.mark.parametrize(
    ("a", "b", "dtype", "expected"),
    [
        ([0.0], [-0.0], torch.float32, [0.0, 0.0, 0.0]),
        ([1.0], [0.0], torch.float32, [1.0, math.inf, math.inf]),
        ([1.0], [math.nan], torch.float32, [math.nan] * 3),
        ([math.inf], [2.0], torch.float32, [math.inf] * 3),
        ([-math.inf], [math.inf], torch.float32, [math.inf] * 3),
        # what is infinite in both hides no difference
        ([5.0, math.inf, 3.0], [4.0, math.inf, 3.0], torch.float32, [1.0, 1 / 4, 1 / 5]),
        # integers are subtracted as integers
        ([2**60], [2**60 + 1], torch.int64, [1.0]),
        ([-(2**63)], [2**63 - 1], torch.int64, [2.0**64]),
        ([2**64 - 1], [2**64 - 2], torch.uint64, [1.0]),
        ([0], [2**64 - 1], torch.uint64, [2.0**64]),
        ([255], [3], torch.uint8, [252.0]),
        ([True], [False], torch.bool, [1.0]),
    ],
)
def test_special_values(a: list[Any], b: list[Any], dtype: torch.dtype, expected: list[float], tmp_path: Path) -> None:
    for name, values in (("a", a), ("b", b)):
        write(tmp_path / name, {("buffer", "w"): torch.tensor(values, dtype=dtype)}, world=1)
    (item,) = compare(tmp_path / "a", tmp_path / "b").values
    assert (item.num_different, item.first) == (1, 0)
    assert [item.max_abs, item.max_rel, item.normwise][: len(expected)] == pytest.approx(expected, nan_ok=True)


def test_missing_and_reshaped_tensors_are_listed(pair: Pair) -> None:
    path, tensors = pair
    tensors["master", "new"] = tensors.pop(("master", "weight"))
    tensors["buffer", "running_mean"] = tensors["buffer", "running_mean"].float()
    tensors["exp_avg", "weight"] = tensors["exp_avg", "weight"].t().contiguous()
    write(path / "b", tensors)
    found = compare(path / "a", path / "b")
    assert (found.only_a, found.only_b) == (("master:weight",), ("master:new",))
    weight = ("exp_avg:weight", "F32 [5, 7]", "F32 [7, 5]")
    assert found.reshaped == (("buffer:running_mean", "BF16 [6]", "F32 [6]"), weight)
    assert not found.tensors_equal
    assert compare(path / "a", path / "b", kinds=["exp_avg_sq"]).tensors_equal
    with pytest.raises(CheckpointError, match="holds a tensor of kind 'masters'; did you mean 'master'"):
        compare(path / "a", path / "b", kinds=["masters"])


def test_each_side_must_verify_and_damaged_data_is_not_called_equal(pair: Pair, capsys: Any) -> None:
    """The fingerprints of the two manifests are equal; the bytes of one file are not what they were."""
    path, tensors = pair
    bad = write(path / "b", tensors) / R1
    flip(R1, 1.0)(bad.parent)
    for words in (["a", "b"], ["b", "a"], ["a", "b", "--bytes", "--no-verify"]):
        assert main(["diff", *(word if word[0] == "-" else str(path / word) for word in words)]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert re.match(f"dtrain: {bad}: (blake3|sha256) differs", printed.err)
    assert main(["diff", str(path / "a"), str(path / "b"), "--no-verify"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("10 by their fingerprints alone, which the manifests state; the files were not read")
    bad.unlink()
    with pytest.raises(DamageError, match=f"{bad}: missing"):
        compare(path / "a", path / "b", kinds=["buffer"])


def test_the_command_prints_it_and_exits_1(pair: Pair, capsys: Any) -> None:
    path, tensors = pair
    tensors["master", "weight"][2, 3] += 1
    write(path / "b", tensors, step=6, config={"optim": {"lr": 0.2}, "new": "x" * 100})
    arguments = ["diff", str(path / "a"), str(path / "b")]
    assert main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"a: {path}/a/checkpoints/step-00000005", f"b: {path}/b/step-00000006"]
    assert lines[2:4] == ["state step: 5 | 6", "state config.optim.lr: 0.1 | 0.2"]
    assert lines[4] == f"state config.new: - | {'x' * 57}..."
    assert lines[5].startswith("state config_hash: ")
    assert lines[6].startswith("master:weight: 1 of 35 differ, the first at 17; max abs 1, max rel ")
    assert lines[7] == "9 of 10 tensors of both are equal bit for bit, 9 by their fingerprints alone"
    assert main([*arguments, "--kind", "exp_avg", "--kind", "exp_avg_sq", "--bytes"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "4 of 4 tensors of both are equal bit for bit, 0 by their fingerprints alone"
