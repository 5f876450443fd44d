"""Trainer on an engine over two ranks: equal to transformers' own under DDP, killed, and resumed with equal bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import dtrain
from tests.helpers.oracle import normwise_error
from tests.helpers.ranks import RankFailure, run_ranks
from tests.helpers.trainers import (
    EngineTrainer,
    KilledInSave,
    Overflowing,
    be_rank,
    build_model,
    needs_trainer,
    run_trainer,
    text_rows,
)

pytestmark = [pytest.mark.processes, needs_trainer]

WORLD = 2
ENGINES = {"native-3": dtrain.Native(zero_stage=3), "fsdp2": dtrain.FSDP2()}
KEYS = ("loss", "grad_norm", "learning_rate", "eval_loss")


def train_each(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Trains with transformers and with each engine, and with a gradient that overflows on rank 1."""
    be_rank(rank, world)
    results = {}

    def train(name: str, kind: type, **options: Any) -> Any:
        run = run_trainer(kind, folder / name, model=build_model("llama"), **options)
        results[name] = {key: run.values(key) for key in KEYS} | {"weights": run.weights}
        return run.trainer

    options = {"eval_strategy": "steps", "eval_steps": 3}
    train("plain", transformers.Trainer, **options)
    for name, engine in ENGINES.items():
        trainer = train(name, EngineTrainer, trainer={"dtrain": {"engine": engine}}, **options)
        assert trainer.engine.name == name.split("-")[0]
    of_rank = {"average_tokens_across_devices": False}
    train("plain, tokens of a rank", transformers.Trainer, **of_rank)
    train("native, tokens of a rank", EngineTrainer, **of_rank)
    Overflowing.on_rank = 1
    trainer = train("overflow", Overflowing)
    assert (trainer.engine.applied_steps, trainer.lr_scheduler.last_epoch) == (5, 5)
    return results


def test_two_ranks_train_as_plain_trainer(tmp_path: Path) -> None:
    ranks = run_ranks(WORLD, train_each, tmp_path)
    pairs = [(name, "plain") for name in ENGINES] + [("native, tokens of a rank", "plain, tokens of a rank")]
    for name, reference in pairs:
        for rank, results in enumerate(ranks):
            for key in KEYS:
                assert results[name][key] == pytest.approx(results[reference][key], rel=1e-5), (name, rank, key)
        assert normwise_error(ranks[0][name]["weights"], ranks[0][reference]["weights"]) < 1e-5, name
    # the tokens of the ranks differ, or the two averages would be the same
    losses = [ranks[0][name]["loss"] for name in ("plain", "plain, tokens of a rank")]
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)
    assert len(ranks[0]["native-3"]["eval_loss"]) == 2
    for results in ranks:
        assert results["overflow"]["learning_rate"] == pytest.approx([1e-3 * (1 - n / 6) for n in (0, 1, 2, 2, 3, 4)])


def train_and_save(rank: int, world: int, *runs: tuple[Path, type, bool]) -> list[tuple[dict[str, Any], Any, int]]:
    """Trains for eight steps, in each folder with a kind of trainer, from its start or from a checkpoint."""
    be_rank(rank, world)
    results = []
    for folder, kind, resume in runs:
        run = run_trainer(
            kind,
            folder,
            model=build_model(resid_pdrop=0.1),
            rows=text_rows(48),  # four steps an epoch
            resume=resume,
            max_steps=8,
            save_strategy="steps",
            save_steps=2,
            trainer={"dtrain": {"engine": dtrain.Native(zero_stage=2)}},
        )
        results.append(({key: run.values(key) for key in KEYS}, run.weights, run.trainer._initial_global_step))
    return results


@pytest.mark.exhaustive
def test_killed_in_a_save_and_resumed_with_equal_bits(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with pytest.raises(RankFailure, match="died without a result"):
        run_ranks(WORLD, train_and_save, (killed, KilledInSave, False))
    assert (killed / "checkpoint-6" / "dtrain" / "step-00000006").is_dir()
    ranks = run_ranks(WORLD, train_and_save, (killed, EngineTrainer, True), (whole, EngineTrainer, False))
    for (logs, weights, start), (expected_logs, expected, _) in ranks:
        assert start == 4
        assert len(expected_logs["loss"]) == 8
        assert logs == expected_logs  # of all steps: trainer_state.json has those before the kill
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
