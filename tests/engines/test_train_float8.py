"""``dtrain train precision=fp8``: by emulation on CPU, within a bound of BF16, on any number of ranks at any stage."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.helpers.launch import log_of, losses, record_of, summary, train

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive]

SMALL = (  # a part of what data=stdlib reads
    *("data=text", f"data.files={Path(asyncio.__file__).parent}/*.py", "data.validation_percent=20"),
    *("model.num_layers=2", "model.hidden_dim=64", "model.num_heads=2", "model.max_seq_len=64"),
    *("optim.lr=1e-3", "schedule.warmup_steps=4", "train.steps=12", "train.log_every=1", "train.eval_batches=4"),
    *("train.micro_batch_size=2", "train.global_batch_size=4", "train.save_every=0", "train.sample_tokens=0"),
    "launch.threads_per_rank=1",
)
BOUND = 0.0025
"""How far the loss in FP8 may be from that in BF16, relative: each step's here, and the validation loss at the end."""


SAME = ("precision=fp8", "engine.reproducible=true")


def test_ranks_and_stages_change_no_bit_and_both_recipes_stay_within_the_bound(tmp_path: Path) -> None:
    def run(name: str, *overrides: str, world: int = 1) -> Path:
        assert train(tmp_path / name, *SMALL, *overrides, world=world) == [0] * world
        return tmp_path / name

    bf16, rowwise = run("bf16", "precision=bf16"), run("rowwise", "precision=fp8", "precision.float8.recipe=rowwise")
    single, sharded = run("single", *SAME), run("sharded", *SAME, "engine.zero_stage=3", world=2)
    assert record_of(single) == record_of(sharded)
    assert losses(bf16)[-1] < 0.9 * losses(bf16)[0], "it learns"
    for fp8 in (rowwise, sharded):
        assert losses(fp8) != losses(bf16)
        assert losses(fp8) == pytest.approx(losses(bf16), rel=BOUND)
        assert summary(fp8)["val_loss"] == pytest.approx(summary(bf16)["val_loss"], rel=BOUND)
        assert summary(fp8)["precision"] == "fp8"
        assert "in fp8" in log_of(fp8)
