"""``dtrain train precision=fp8``: by emulation on CPU, within a bound of BF16, on any number of ranks at any stage."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launch import log_of, losses, record_of, summary, train

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive]

SMALL = (
    "data=text",  # a part of what data=stdlib reads
    f"data.files={Path(asyncio.__file__).parent}/*.py",
    "data.validation_percent=20",
    "model.num_layers=2",
    "model.hidden_dim=64",
    "model.num_heads=2",
    "model.max_seq_len=64",
    "optim.lr=1e-3",
    "schedule.warmup_steps=4",
    "train.steps=12",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "train.log_every=1",
    "train.eval_batches=4",
    "train.save_every=0",
    "train.sample_tokens=0",
    "launch.threads_per_rank=1",
)
BOUND = 0.0025
"""How far the loss in FP8 may be from that in BF16, relative: each step's here, and the validation loss at the end."""


def run(folder: Path, name: str, *overrides: str, world: int = 1) -> Path:
    assert train(folder / name, *SMALL, *overrides, world=world) == [0] * world
    return folder / name


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("bf16"), "run", "precision=bf16")


def near(got: Path, want: Path) -> None:
    assert losses(want)[-1] < 0.9 * losses(want)[0], "it learns"
    assert losses(got) != losses(want)
    assert losses(got) == pytest.approx(losses(want), rel=BOUND)
    assert summary(got)["val_loss"] == pytest.approx(summary(want)["val_loss"], rel=BOUND)


def test_rowwise_is_within_the_bound(tmp_path: Path, bf16: Path) -> None:
    fp8 = run(tmp_path, "run", "precision=fp8", "precision.float8.recipe=rowwise")
    near(fp8, bf16)
    assert summary(fp8)["precision"] == "fp8"
    assert "in fp8" in log_of(fp8)


def test_ranks_and_stages_change_no_bit_and_stay_within_the_bound(tmp_path: Path, bf16: Path) -> None:
    same: list[Any] = []
    for world, stage in ((1, 0), (2, 3)):
        words = ("precision=fp8", "engine.reproducible=true", f"engine.zero_stage={stage}")
        same.append(record_of(run(tmp_path, f"{world}-{stage}", *words, world=world)))
    assert same[0] == same[1]
    near(tmp_path / "2-3", bf16)
