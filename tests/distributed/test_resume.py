"""Runs that go on with another number of ranks, or past a damaged checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.damage import R0, flip
from tests.helpers.launch import SEQ_LEN, SMALL, checkpoints, log_of, newest_step, record_of, train
from tests.helpers.mishap import Mishap

pytestmark = pytest.mark.processes

REPRODUCIBLE = "engine.reproducible=true"


def test_a_batch_that_grows_has_the_same_bits_on_other_ranks_after_a_kill(tmp_path: Path, data: str) -> None:
    """Killed in the second of three phases, before a checkpoint of the third."""
    grown = ["train.global_batch_size={0: 6, 5: 12}", f"train.seq_len={{0: {SEQ_LEN // 4}, 6: {SEQ_LEN}}}"]
    words = [word for word in SMALL if not word.startswith(("train.global_batch_size=", "train.steps="))]
    command = [*words, data, REPRODUCIBLE, "engine.zero_stage=3", "train.steps=9", "checkpoint.asynchronous=false"]
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert train(whole, *command, *grown) == [0]
    assert train(run_dir, *command, *grown, world=2, env=Mishap("vote", 6, rank=1).env()) is None
    assert newest_step(run_dir) == 4
    assert train(run_dir, *command, *grown, world=3) == [0] * 3
    assert record_of(run_dir) == record_of(whole)
    lines = [line for line in record_of(whole).curve if "loss" in line]
    sizes = [(line["global_batch_size"], line["seq_len"], line["tokens"] // SEQ_LEN) for line in lines]
    short, long = SEQ_LEN // 4, SEQ_LEN
    phases = [[(6, short, 6 * step) for step in range(1, 6)], [(12, long, 30 + 12 * step) for step in range(2, 5)]]
    assert sizes == [*phases[0], (12, short, 42), *phases[1]]


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path: Path, data: str) -> None:
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert train(whole, *SMALL, data, REPRODUCIBLE) == [0]
    # step 8 is saved by step 11, however slow the disk
    words = [*SMALL, data, REPRODUCIBLE, "checkpoint.asynchronous=false"]
    assert train(run_dir, *words, env=Mishap("vote", 11).env()) is None
    assert checkpoints(run_dir) == ["lease-00000001.json", "step-00000004", "step-00000008"]
    damaged = run_dir / "checkpoints/step-00000008"
    flip(R0, 0.5)(damaged)
    assert train(run_dir, *SMALL, data, REPRODUCIBLE) == [0]
    told = log_of(run_dir)
    assert f"{damaged} refused: r0000.safetensors: " in told
    assert f"using {run_dir}/checkpoints/step-00000004 (saved " in told
    assert record_of(run_dir) == record_of(whole)
    assert checkpoints(run_dir) == ["bad-step-00000008-hash", "step-00000008", "step-00000012"]
