"""The same ``dtrain train`` command under each engine: one curve, one run directory, one checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launch import CORE, checkpoints, command_line, listing, log_of, losses, summary, train

pytestmark = pytest.mark.processes

WORLD = 2
STEPS = 4
COMMAND = (
    *(*CORE, "schedule=constant", "schedule.warmup_steps=1", "precision=fp32"),
    *("train.save_every=2", f"train.eval_every={STEPS}"),
)
TOLERANCE = 1e-5  # relative; promise P5


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory, data: str) -> Path:
    """The run directory of the native engine."""
    folder = tmp_path_factory.mktemp("native") / "run"
    assert _train(folder, "native", data) == [0] * WORLD
    return folder


def _train(run_dir: Path, engine: str, *overrides: str, steps: int = STEPS) -> list[int] | None:
    return train(run_dir, *COMMAND, f"train.steps={steps}", f"engine={engine}", *overrides, world=WORLD)


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "deepspeed"])
def test_one_command_one_curve(tmp_path: Path, data: str, native: Path, engine: str) -> None:
    run_dir = tmp_path / "run"
    assert _train(run_dir, engine, data) == [0] * WORLD
    assert losses(run_dir) == pytest.approx(losses(native), rel=TOLERANCE)
    got, want = summary(run_dir), summary(native)
    assert got["engine"] == engine
    assert got["val_loss"] == pytest.approx(want["val_loss"], rel=TOLERANCE)
    assert got.keys() == want.keys()
    of_a_run = ("steps", "applied_steps", "skipped_steps", "tokens", "world_size", "precision", "num_parameters")
    assert {key: got[key] for key in of_a_run} == {key: want[key] for key in of_a_run}
    assert got["finished"]
    extra = {"deepspeed.json"} if engine == "deepspeed" else set()
    assert set(listing(run_dir)) == set(listing(native)) | extra
    assert checkpoints(run_dir) == ["step-00000002", f"step-{STEPS:08d}"]


def test_run_resumes_under_another_engine(tmp_path: Path, data: str, native: Path) -> None:
    run_dir = tmp_path / "run"
    for steps, engine in enumerate(("ddp", "deepspeed", "fsdp2", "native"), 1):
        assert _train(run_dir, engine, data, steps=steps) == [0] * WORLD
        assert summary(run_dir)["engine"] == engine
        assert checkpoints(run_dir)[-1] == f"step-{steps:08d}"
    assert losses(run_dir) == pytest.approx(losses(native), rel=TOLERANCE)
    assert "engine.name=deepspeed (was ddp)" in log_of(run_dir)


def test_unsupported_option_is_refused_in_one_line(tmp_path: Path, data: str) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    assert command_line(log, *COMMAND, data, f"run_dir={run_dir}", "engine=fsdp2", "engine.zero_stage=1") == 2
    (line,) = log.read_text(encoding="utf-8").splitlines()
    assert line.startswith("dtrain: engine=fsdp2 cannot do ")
    assert "fully_shard shards gradients and masters always" in line
    assert not run_dir.exists()
