"""Trainer on an engine over two ranks: equal to transformers' own under DDP and to ``dtrain train``, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import dtrain
from dtrain.checkpoint import export
from dtrain.cli.resolve import compose
from dtrain.config.schema import RunConfig
from dtrain.data import load_dataset
from dtrain.distributed.startup.setup import connect_by_file
from dtrain.tasks import IGNORE_INDEX
from dtrain.telemetry.metrics import read_metrics
from dtrain.train.run import run_training
from tests.helpers import trainers
from tests.helpers.hf_models import load_hf, save_hf
from tests.helpers.oracle import normwise_error
from tests.helpers.ranks import RankFailure, run_ranks
from tests.helpers.token_shards import write_shards
from tests.helpers.trainers import EngineTrainer, KilledInSave, Overflowing, be_rank, build_model, run_trainer

pytestmark = [pytest.mark.processes, trainers.needs_trainer]

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


def classify(rank: int, world: int, folder: Path) -> dict[str, list[float]]:
    """Trains and evaluates a model that takes the mean over its own micro-batch, of eight rows a step."""
    be_rank(rank, world)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=40, num_labels=3, **sizes, **no_dropout)
    rows = [{"input_ids": torch.tensor([2 + i, 3, 4, 1]), "labels": i % 3} for i in range(24)]
    args = trainers.arguments(
        folder / str(world), max_steps=3, per_device_train_batch_size=8 // world**2, gradient_accumulation_steps=world,
        per_device_eval_batch_size=8 // world, eval_strategy="steps", eval_steps=3, max_grad_norm=1e9,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = EngineTrainer(
        transformers.BertForSequenceClassification(config), args, train_dataset=rows, eval_dataset=rows[:16]
    )
    trainer.train()
    return {key: [float(entry[key]) for entry in trainer.state.log_history if key in entry] for key in KEYS}


def test_a_mean_loss_does_not_grow_with_ranks_and_accumulation(tmp_path: Path) -> None:
    (whole,) = run_ranks(1, classify, tmp_path)
    for cut in run_ranks(2, classify, tmp_path):
        for key in KEYS:
            assert cut[key] == pytest.approx(whole[key], rel=1e-5), key
    assert 1.0 < whole["eval_loss"][0] < 1.2


def train_and_save(rank: int, world: int, *runs: tuple[Path, type, bool]) -> list[tuple[dict[str, Any], Any, int]]:
    """Trains for eight steps, in each folder with a kind of trainer, from its start or from a checkpoint."""
    be_rank(rank, world)
    results = []
    for folder, kind, resume in runs:
        run = run_trainer(  # four steps an epoch
            kind, folder, model=build_model(resid_pdrop=0.1), rows=trainers.text_rows(48), resume=resume, max_steps=8,
            save_strategy="steps", save_steps=2, trainer={"dtrain": {"engine": dtrain.Native(zero_stage=2)}},
        )  # fmt: skip
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


STEPS, ROWS, ACCUMULATION, SEQ_LEN, VOCAB = 8, 2, 2, 16, 257
LR, DECAY = 3e-3, 0.1
MAX_NORM = {1: 2.5, 2: 2.0}  # by ranks, between the norms of the steps: Adam would not notice if all were clipped
EPS = 1e-6  # Adam with its default would turn the rounding of a gradient that cancels out into steps of the rate
# names in the logs of Trainer, and in metrics.jsonl
METRICS = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}

DATA = {
    "text": ["data=text", "data.files=FOLDER/squares.txt"],
    "masked": ["data=tokens", "data.path=FOLDER/tokens", "data.documents=mask"],
}


def settings(folder: Path, case: str, world: int) -> RunConfig:
    """Returns the settings of the command, with the betas and the schedule of Trainer."""
    return compose(
        [
            *(key.replace("FOLDER", str(folder)) for key in DATA[case]),
            *(f"run_dir={folder}/{case}-{world}-run", "precision=fp32", "supervise.enabled=false", "report=false"),
            *("model=hf", f"model.path={folder}/model", f"model.max_seq_len={SEQ_LEN}"),
            *(f"optim.lr={LR}", f"optim.weight_decay={DECAY}", f"optim.eps={EPS}", "optim.betas=[0.9,0.999]"),
            f"optim.max_grad_norm={MAX_NORM[world]}",
            *("schedule=linear", "schedule.warmup_steps=0", "schedule.min_ratio=0.0"),
            *(f"train.steps={STEPS}", f"train.micro_batch_size={ROWS}"),
            f"train.global_batch_size={ROWS * ACCUMULATION * world}",
            *("train.log_every=1", "train.eval_batches=1", "train.sample_tokens=0"),
            *("launch.threads_per_rank=1", "launch.device=cpu"),
        ]
    )


def rows_of(config: RunConfig) -> list[dict[str, Tensor]]:
    """Returns what a script for Trainer has: the samples of all steps and ranks in their order, with their labels.

    transformers shifts the labels, so that a row has one token more than a sample.
    """
    dataset = load_dataset(config.data, SEQ_LEN)
    places = np.arange(config.train.steps * config.train.global_batch_size)
    batch = dataset.train.batch(dataset.train.order(config.seed, places))
    tokens, targets = batch["tokens"], batch["targets"]
    ignored = torch.full_like(targets[:, :1], IGNORE_INDEX)
    rows = {"input_ids": torch.cat([tokens, targets[:, -1:].clamp(min=0)], dim=1)}
    rows["labels"] = torch.cat([ignored, targets], dim=1)
    if (positions := batch.get("positions")) is not None:
        rows["position_ids"] = torch.cat([positions, positions[:, -1:] + 1], dim=1)
    return [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]


def train_by_trainer(folder: Path, case: str, world: int, rows: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """Returns the log of each step; leaves the weights in a folder."""
    from dtrain.integrations.trainer import Trainer

    args = trainers.arguments(
        folder / f"{case}-{world}-trainer", max_steps=STEPS, per_device_train_batch_size=ROWS, learning_rate=LR,
        gradient_accumulation_steps=ACCUMULATION, weight_decay=DECAY, adam_epsilon=EPS, max_grad_norm=MAX_NORM[world],
        train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = Trainer(load_hf(folder / "model"), args, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(folder / f"{case}-{world}-saved"))
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def train_by_both(rank: int, world: int, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Trains on all data by Trainer, then by the command; returns the logs of Trainer."""
    be_rank(rank, world)
    configs = {case: settings(folder, case, world) for case in DATA}
    logs = {case: train_by_trainer(folder, case, world, rows_of(config)) for case, config in configs.items()}
    for case, config in configs.items():
        # a run leaves no process group behind
        if not torch.distributed.is_initialized():
            connect_by_file(f"{folder}/{case}-{world}-store", rank, world, torch.device("cpu"))
        assert run_training(config) == 0
    return logs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a text, and documents of which many have one token, and so no target."""
    folder = tmp_path_factory.mktemp("equal")
    save_hf(folder / "model", "llama", vocab_size=VOCAB)
    text = " ".join(f"{n} squared is {n * n};" for n in range(500))
    (folder / "squares.txt").write_text(text)
    draw = np.random.default_rng(0)
    lengths = [length for _ in range(60) for length in (*[1] * 40, *[3, 2] * 10, 60)]
    write_shards(folder / "tokens", [[draw.integers(1, VOCAB, length) for length in lengths]], vocab_size=VOCAB)
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [1, 2])
def test_a_trainer_script_trains_as_the_command(folder: Path, world: int) -> None:
    rows = rows_of(settings(folder, "masked", world))
    counts = torch.stack([row["labels"] != IGNORE_INDEX for row in rows]).view(-1, ROWS * (SEQ_LEN + 1)).sum(1)
    assert (int(counts.min()), int(counts.max())) == (0, ROWS * SEQ_LEN), "micro-batches have unequal numbers"
    ranks = run_ranks(world, train_by_both, folder) if world > 1 else [train_by_both(0, 1, folder)]
    for case in DATA:
        run = folder / f"{case}-{world}-run"
        expected = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
        assert [line["step"] for line in expected] == [*range(1, STEPS + 1)]
        norms = [line["grad_norm"] for line in expected]
        assert min(norms) < MAX_NORM[world] < max(norms), "some steps must be clipped"
        for rank, logs in enumerate(ranks):
            for key, name in METRICS.items():
                values = [entry[key] for entry in logs[case]]
                assert values == pytest.approx([line[name] for line in expected], rel=1e-5), (case, rank, key)
        exported = load_hf(export(run, folder / f"{case}-{world}-exported"))
        weights = {name: parameter.detach() for name, parameter in exported.named_parameters()}
        assert normwise_error(trainers.saved_weights(folder / f"{case}-{world}-saved"), weights) < 1e-5, case
