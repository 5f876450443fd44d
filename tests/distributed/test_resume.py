"""Runs that go on with another number of ranks, or past a damaged checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launch import SMALL, checkpoints, log_of, losses, newest_step, record_of, train, write_samples
from tests.helpers.mishap import Mishap

pytestmark = pytest.mark.processes

REPRODUCIBLE = "engine.reproducible=true"
TOLERANCE = 5e-3  # relative, for BF16 (promise P5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_samples(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: str) -> Path:
    """The run on one rank that was never ended, summed in the canonical order."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert train(run_dir, *SMALL, data, REPRODUCIBLE) == [0]
    return run_dir


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, data: str) -> Path:
    """The run on one rank that was never ended, summed in the order in which gradients come."""
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    assert train(run_dir, *SMALL, data) == [0]
    return run_dir


@pytest.mark.parametrize(("before", "after", "stage"), [(2, 1, 3), (1, 3, 2), (1, 2, 3)])
def test_another_world_size_has_the_same_bits(
    tmp_path: Path, data: str, whole: Path, before: int, after: int, stage: int
) -> None:
    run_dir = tmp_path / "run"
    # step 4 is saved by step 7, however slow the disk
    command = [*SMALL, data, REPRODUCIBLE, f"engine.zero_stage={stage}", "checkpoint.asynchronous=false"]
    killed = Mishap("vote", 7, rank=before - 1).env()
    assert train(run_dir, *command, world=before, env=killed) is None
    assert newest_step(run_dir) == 4
    assert train(run_dir, *command, world=after) == [0] * after
    assert record_of(run_dir) == record_of(whole)


@pytest.mark.parametrize(("before", "after", "stage"), [(2, 1, 2), (1, 3, 0)])
def test_another_world_size_has_the_same_curve(
    tmp_path: Path, data: str, plain: Path, before: int, after: int, stage: int
) -> None:
    run_dir = tmp_path / "run"
    command = [*SMALL, data, f"engine.zero_stage={stage}"]
    assert train(run_dir, *command, world=before, env=Mishap("vote", 7, rank=before - 1).env()) is None
    assert train(run_dir, *command, world=after) == [0] * after
    assert losses(run_dir) == pytest.approx(losses(plain), rel=TOLERANCE)


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path: Path, data: str, plain: Path) -> None:
    run_dir = tmp_path / "run"
    words = [*SMALL, data, "checkpoint.asynchronous=false"]  # step 8 is saved by step 11, however slow the disk
    assert train(run_dir, *words, env=Mishap("vote", 11).env()) is None
    assert checkpoints(run_dir) == ["lease-00000001.json", "step-00000004", "step-00000008"]
    file = run_dir / "checkpoints/step-00000008/r0000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert train(run_dir, *SMALL, data) == [0]
    told = log_of(run_dir)
    assert f"{file.parent} refused: r0000.safetensors: " in told
    assert f"using {run_dir}/checkpoints/step-00000004 (saved " in told
    assert record_of(run_dir) == record_of(plain)
    assert checkpoints(run_dir) == ["bad-step-00000008-hash", "step-00000008", "step-00000012"]
