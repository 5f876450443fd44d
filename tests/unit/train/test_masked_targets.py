"""With masked targets the trainer's loss is the mean over targets, however ranks and micro-batches cut the batch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dtrain
from dtrain.config.model import ModelConfig
from dtrain.config.schema import CheckpointConfig, TrainConfig
from dtrain.data import BatchLoader, SampleSource, validation_batches
from dtrain.data.sampling import Indices, sample_ids
from dtrain.engine.interface import Engine
from dtrain.engine.step import StepEngine
from dtrain.errors import ConfigError
from dtrain.models import build_model
from dtrain.tasks import IGNORE_INDEX, Language
from dtrain.train import trainer
from dtrain.train.signals import StopSignals
from dtrain.train.trainer import SaveOptions, Trainer, TrainingData, TrainResult
from dtrain.train.validation import validate
from tests.helpers.ranks import run_ranks

VOCAB, LENGTH, GLOBAL_BATCH, STEPS = 17, 8, 8, 3
CUTS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)]
"""(ranks, micro-batches on each)."""


class Masked(SampleSource):
    """Sequences of which a part counts, from no target to all, as in data of prompts and answers."""

    num_samples = 40

    def __init__(self, *, masks: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(VOCAB, (self.num_samples, LENGTH + 1), generator=generator)
        self.num_prompt = torch.randint(LENGTH + 1, (self.num_samples,), generator=generator)
        self.num_prompt[sample_ids(0, np.arange(2), self.num_samples)] = LENGTH  # the first ones in the training
        if not masks:
            self.num_prompt.zero_()

    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        ids = torch.from_numpy(sample_ids)
        is_prompt = torch.arange(LENGTH) < self.num_prompt[ids, None]
        tokens = self.tokens[ids]
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].masked_fill(is_prompt, IGNORE_INDEX)}


def model() -> nn.Module:
    config = ModelConfig(num_layers=1, hidden_dim=16, num_heads=2, ffn_dim=16, max_seq_len=LENGTH)
    return build_model(config, VOCAB, seed=1)


def start() -> Engine:
    # not AdamW's default eps of 1e-8, with which a gradient of rounding errors makes a full step
    return dtrain.initialize(model(), optimizer=dtrain.AdamW(lr=1e-2, eps=1e-3), precision="fp32", seed=0)


def make_trainer(engine: Engine, source: Masked, num_micro_batches: int, steps: int) -> Trainer:
    rank, world = engine.rank, engine.world_size
    size = GLOBAL_BATCH // (world * num_micro_batches)
    data = TrainingData(
        BatchLoader(source, 0, size, num_micro_batches, rank, world),
        lambda: validation_batches(source, size, GLOBAL_BATCH // size, rank, world),
        task=Language(VOCAB),
        tokens_per_micro_batch=size * LENGTH,
    )
    config = TrainConfig(steps=steps, eval_every=0, save_every=0)
    saving = SaveOptions(Path("unused"), {}, {}, CheckpointConfig(asynchronous=False, save_at_end=False))
    return Trainer(engine, data, config, saving, stop=StopSignals())


def train(
    rank: int, world: int, num_micro_batches: int, masks: bool, is_weighted: bool, steps: int = STEPS
) -> TrainResult:
    loop = make_trainer(start(), Masked(masks=masks), num_micro_batches, steps)
    if is_weighted:
        return loop.run()
    with patch.object(trainer, "num_targets", Tensor.numel):
        return loop.run()


def losses(masks: bool, is_weighted: bool) -> np.ndarray[Any, Any]:
    """Training and validation loss after STEPS steps, [cut, 2]."""
    results = [run_ranks(world, train, number, masks, is_weighted) for world, number in CUTS]
    assert all(each[0].train_loss == other.train_loss for each in results for other in each)
    if is_weighted:
        assert {result.tokens for each in results for result in each} == {num_trained(Masked(masks=masks))}
    return np.array([(result.train_loss, result.val_losses["val_loss"]) for result, *_ in results])


def num_trained(source: Masked) -> int:
    """Targets that count in the samples of STEPS steps."""
    targets = source.batch(source.order(0, np.arange(STEPS * GLOBAL_BATCH)))["targets"]
    return int((targets != IGNORE_INDEX).sum())


@pytest.mark.processes
def test_every_cut_of_a_global_batch_has_the_same_loss() -> None:
    found = losses(masks=True, is_weighted=True)
    np.testing.assert_allclose(found, found[:1].repeat(len(CUTS), axis=0), rtol=3e-6)
    unweighted = losses(masks=True, is_weighted=False)
    assert (np.ptp(unweighted, axis=0) > 1e-2).all(), f"the control: cuts that show {unweighted}"


def first_batch() -> dict[str, Tensor]:
    return Masked().batch(sample_ids(0, np.arange(GLOBAL_BATCH), Masked.num_samples))


def test_the_loss_is_the_mean_over_all_targets() -> None:
    batch = first_batch()
    counts = batch["targets"] != IGNORE_INDEX
    assert not counts[0].any(), "and there are micro-batches without one"
    assert 0.2 < counts.float().mean() < 0.8
    logits = model()(batch["tokens"]).logits
    expected = F.cross_entropy(logits[counts], batch["targets"][counts])
    for num_micro_batches in (1, 4, 8):
        found = train(0, 1, num_micro_batches, masks=True, is_weighted=True, steps=1).train_loss
        assert found == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_without_masked_targets_nothing_changes(num_micro_batches: int) -> None:
    seen: list[float] = []
    backward = StepEngine.backward

    def recorded(self: StepEngine, loss: Any, *, weight: float) -> None:
        seen.append(weight)
        backward(self, loss, weight=weight)

    with patch.object(StepEngine, "backward", recorded):
        train(0, 1, num_micro_batches, masks=False, is_weighted=True)
    assert seen == [1.0] * STEPS * num_micro_batches


class AllMasked(Masked):
    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        batch = super().batch(sample_ids)
        return {**batch, "targets": torch.full_like(batch["targets"], IGNORE_INDEX)}


def test_a_step_and_a_validation_without_targets() -> None:
    engine = start()
    before = engine.master_state()
    loop = make_trainer(engine, AllMasked(), num_micro_batches=2, steps=1)
    with pytest.raises(ConfigError, match="no target of the validation data counts"):
        loop.run()
    assert (engine.attempted_steps, engine.applied_steps) == (1, 0)
    assert all(torch.equal(before[name], value) for name, value in engine.master_state().items())


class MeanOverNothing(torch.nn.Module):
    """A model whose loss is NaN without targets, as ``F.cross_entropy`` gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.inner(tokens).logits.flatten(0, 1), targets.flatten())}


def test_a_validation_micro_batch_without_targets_does_not_count() -> None:
    engine = dtrain.initialize(MeanOverNothing(), precision="fp32", seed=0)
    source = Masked()
    with engine.eval():
        assert math.isnan(engine(**{name: tensor[:1] for name, tensor in first_batch().items()})["loss"].item())
    found = [
        validate(engine, Language(VOCAB), validation_batches(source, size, 24 // size))["loss"] for size in (1, 4, 12)
    ]
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)
