"""The same ``dtrain train`` command under each engine: one curve, one run directory, one checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.config.capabilities import CAPABILITIES
from tests.helpers.launch import (
    CORE,
    checkpoints,
    command_line,
    listing,
    log_of,
    losses,
    newest_step,
    summary,
    train,
    write_samples,
)

pytestmark = pytest.mark.processes

WORLD = 2
STEPS = 8
COMMAND = (*CORE, "schedule=constant", f"train.steps={STEPS}", f"train.eval_every={STEPS}")
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}  # relative; promise P5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_samples(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory, data: str) -> dict[str, Path]:
    """By precision, the run directory of the native engine."""
    folder = tmp_path_factory.mktemp("native")
    for precision in TOLERANCE:
        assert _train(folder / precision, "native", data, f"precision={precision}") == [0] * WORLD
    return {precision: folder / precision for precision in TOLERANCE}


def _train(run_dir: Path, engine: str, *overrides: str) -> list[int] | None:
    return train(run_dir, *COMMAND, f"engine={engine}", *overrides, world=WORLD)


@pytest.mark.parametrize("engine", [name for name in CAPABILITIES if name != "native"])
def test_one_command_one_curve(tmp_path: Path, data: str, native: dict[str, Path], engine: str) -> None:
    run_dir = tmp_path / "run"
    assert _train(run_dir, engine, data, "precision=bf16") == [0] * WORLD
    assert losses(run_dir) == pytest.approx(losses(native["bf16"]), rel=TOLERANCE["bf16"])
    got, want = summary(run_dir), summary(native["bf16"])
    assert got["engine"] == engine
    assert got["val_loss"] == pytest.approx(want["val_loss"], rel=TOLERANCE["bf16"])
    assert got.keys() == want.keys()
    same = (
        "steps",
        "applied_steps",
        "skipped_steps",
        "tokens",
        "world_size",
        "precision",
        "num_parameters",
        "finished",
    )
    assert {key: got[key] for key in same} == {key: want[key] for key in same}
    extra = {"deepspeed.json"} if engine == "deepspeed" else set()
    assert set(listing(run_dir)) == set(listing(native["bf16"])) | extra
    assert checkpoints(run_dir) == ["step-00000004", f"step-{STEPS:08d}"]


def test_run_resumes_under_another_engine(tmp_path: Path, data: str, native: dict[str, Path]) -> None:
    run_dir = tmp_path / "run"
    for number, engine in enumerate(("ddp", "deepspeed", "fsdp2", "native"), 1):
        assert _train(run_dir, engine, data, "precision=fp32", f"train.steps={number * STEPS // 4}") == [0] * WORLD
        assert summary(run_dir)["engine"] == engine
        assert newest_step(run_dir) == number * STEPS // 4
    assert losses(run_dir) == pytest.approx(losses(native["fp32"]), rel=TOLERANCE["fp32"])
    assert "engine.name=deepspeed (was ddp)" in log_of(run_dir)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["engine=ddp", "engine.zero_stage=3"], "every rank holds the whole model and its optimizer state"),
        (["engine=fsdp2", "engine.zero_stage=1"], "fully_shard shards gradients and masters always"),
        (["engine=deepspeed", "precision=fp16", "launch.device=cpu"], "DeepSpeed refuses FP16 on CPUs"),
    ],
)
def test_unsupported_option_is_refused_in_one_line(
    tmp_path: Path, data: str, overrides: list[str], reason: str
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    assert command_line(log, *COMMAND, data, f"run_dir={run_dir}", *overrides) == 2
    (line,) = log.read_text(encoding="utf-8").splitlines()
    assert line.startswith(f"dtrain: engine={overrides[0].removeprefix('engine=')} cannot do ")
    assert reason in line
    assert not run_dir.exists()
