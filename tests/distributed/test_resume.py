"""Runs that go on with another number of ranks, or past a damaged checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dtrain.config.data import TokensDataConfig
from dtrain.data import load_dataset
from tests.helpers.launch import (
    SEQ_LEN,
    SMALL,
    checkpoints,
    log_of,
    losses,
    newest_step,
    record_of,
    train,
    write_samples,
)
from tests.helpers.mishap import Mishap, recording, sample_name
from tests.helpers.token_shards import write_packed_shards

pytestmark = pytest.mark.processes

REPRODUCIBLE = "engine.reproducible=true"
WEIGHTS = {"web": 0.7, "code": 0.3}
MORE = [(0, False), (2, True)]
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


@pytest.mark.parametrize(
    ("before", "after", "stage", "reproducible"),
    [
        (2, 1, 3, True),
        *(pytest.param(1, 3, stage, reproducible, marks=pytest.mark.exhaustive) for stage, reproducible in MORE),
        pytest.param(2, 1, 2, False, marks=pytest.mark.exhaustive),
    ],
)
def test_another_world_size_goes_on(
    tmp_path: Path, data: str, whole: Path, before: int, after: int, stage: int, reproducible: bool
) -> None:
    """With the same bits if sums are reproducible, or else near them."""
    run_dir = tmp_path / "run"
    # step 4 is saved by step 7, however slow the disk
    words = (f"engine.reproducible={str(reproducible).lower()}", f"engine.zero_stage={stage}")
    command = [*SMALL, data, *words, "checkpoint.asynchronous=false"]
    assert train(run_dir, *command, world=before, env=Mishap("vote", 7, rank=before - 1).env()) is None
    assert newest_step(run_dir) == 4
    assert train(run_dir, *command, world=after) == [0] * after
    if reproducible:
        assert record_of(run_dir) == record_of(whole)
    assert losses(run_dir) == pytest.approx(losses(whole), rel=TOLERANCE)


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
    assert sizes == [
        *((6, SEQ_LEN // 4, 6 * step) for step in range(1, 6)),
        (12, SEQ_LEN // 4, 42),
        *((12, SEQ_LEN, 30 + 12 * step) for step in range(2, 5)),
    ]


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path: Path, data: str, whole: Path) -> None:
    run_dir = tmp_path / "run"
    # step 8 is saved by step 11, however slow the disk
    words = [*SMALL, data, REPRODUCIBLE, "checkpoint.asynchronous=false"]
    assert train(run_dir, *words, env=Mishap("vote", 11).env()) is None
    assert checkpoints(run_dir) == ["lease-00000001.json", "step-00000004", "step-00000008"]
    file = run_dir / "checkpoints/step-00000008/r0000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert train(run_dir, *SMALL, data, REPRODUCIBLE) == [0]
    told = log_of(run_dir)
    assert f"{file.parent} refused: r0000.safetensors: " in told
    assert f"using {run_dir}/checkpoints/step-00000004 (saved " in told
    assert record_of(run_dir) == record_of(whole)
    assert checkpoints(run_dir) == ["bad-step-00000008-hash", "step-00000008", "step-00000012"]


def test_token_shards_give_the_same_samples_on_other_ranks_after_a_kill(tmp_path: Path) -> None:
    """Packed documents of a mixture: two ranks, one is killed; then three."""
    lengths = [40, 7, 90, 12, 33, 5, 61] * 20
    folders = {str(write_packed_shards(tmp_path / name, lengths, SEQ_LEN)): weight for name, weight in WEIGHTS.items()}
    mixture = ", ".join(f"{folder}: {weight}" for folder, weight in folders.items())
    command = [
        *(word for word in SMALL if not word.startswith(("data=", "train.steps=", "train.global_batch_size="))),
        "data=tokens",
        f"data.mixture={{{mixture}}}",
        "data.pack=best_fit",
        "engine.zero_stage=3",
        "train.steps=6",
        "train.global_batch_size=12",
        "checkpoint.asynchronous=false",
    ]
    steps: dict[int, list[str]] = {}
    for world, mishap, expected in ((2, Mishap("vote", 6, rank=1), None), (3, None, [0] * 3)):
        file = tmp_path / f"samples-{world}"
        env = recording(file) | (mishap.env() if mishap else {})
        assert train(tmp_path / "run", *command, world=world, env=env) == expected
        trained: dict[int, list[str]] = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            step, name = line.split()
            trained.setdefault(int(step), []).append(name)
        assert min(trained) == (0 if world == 2 else 4)
        steps |= trained
    source = load_dataset(TokensDataConfig(mixture=folders, pack="best_fit"), SEQ_LEN).train
    for step in range(6):
        batch = source.batch(source.order(0, np.arange(12 * step, 12 * (step + 1))))
        assert sorted(steps[step]) == sorted(sample_name(tokens) for tokens in batch["tokens"])
