"""Batches of a training: masked targets, cut by ranks and micro-batches, and a batch that grows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dtrain
from dtrain.config.data import StdlibDataConfig
from dtrain.config.growth import BatchGrowth
from dtrain.config.model import ModelConfig
from dtrain.config.schema import CheckpointConfig, RunConfig, TrainConfig
from dtrain.data import Dataset, SampleSource, validation_batches
from dtrain.data.sampling import Indices, sample_ids
from dtrain.engine.interface import Engine
from dtrain.engine.step import StepEngine
from dtrain.errors import ConfigError
from dtrain.models import build_model
from dtrain.tasks import IGNORE_INDEX, Language
from dtrain.train import session
from dtrain.train.flops import flops_between
from dtrain.train.session import Session
from dtrain.train.signals import StopSignals
from dtrain.train.trainer import SaveOptions, Trainer, TrainResult
from dtrain.train.validation import validate
from tests.helpers.net import Net
from tests.helpers.ranks import run_ranks

VOCAB, LENGTH = 17, 8


class Masked(SampleSource):
    """Sequences of which a part counts, from no target to all, as in data of prompts and answers."""

    num_samples = 40

    def __init__(self, masks: str = "some") -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(VOCAB, (self.num_samples, LENGTH + 1), generator=generator)
        self.num_prompt = torch.randint(LENGTH + 1, (self.num_samples,), generator=generator)
        self.num_prompt[sample_ids(0, np.arange(2), self.num_samples)] = LENGTH  # the first ones in the training
        if masks != "some":
            self.num_prompt.fill_(LENGTH if masks == "all" else 0)

    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        ids = torch.from_numpy(sample_ids)
        is_prompt = torch.arange(LENGTH) < self.num_prompt[ids, None]
        tokens = self.tokens[ids]
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].masked_fill(is_prompt, IGNORE_INDEX)}


def model() -> nn.Module:
    config = ModelConfig(num_layers=1, hidden_dim=16, num_heads=2, ffn_dim=16, max_seq_len=LENGTH)
    return build_model(config, VOCAB, seed=1)


def start(name: str = "native", built: nn.Module | None = None) -> Engine:
    # not AdamW's default eps of 1e-8, with which a gradient of rounding errors makes a full step
    optimizer = dtrain.AdamW(lr=1e-2, eps=1e-3)
    return dtrain.initialize(built or model(), optimizer=optimizer, engine=name, precision="fp32", seed=0)


def make_trainer(
    engine: Engine, source: Masked, sizes: Mapping[str, Any], *, prefetch: int = 0, sink: Any = None
) -> Trainer:
    train = TrainConfig(log_every=1, save_every=0, **sizes)
    data = StdlibDataConfig(prefetch=prefetch)
    config = RunConfig(seed=0, train=train, model=ModelConfig(max_seq_len=LENGTH), data=data)
    session = Session(engine, config, Dataset(source, source, "", "", Language(VOCAB)))
    saving = SaveOptions(Path("unused"), {}, {}, CheckpointConfig(asynchronous=False, save_at_end=False))
    return Trainer(session, saving, stop=StopSignals(), sinks=[sink] if sink else [])


GLOBAL_BATCH, STEPS = 8, 3


def masked_trainer(engine: Engine, masks: str, num_micro_batches: int, steps: int = STEPS) -> Trainer:
    sizes = {"global_batch_size": GLOBAL_BATCH, "steps": steps, "eval_every": 0}
    sizes["micro_batch_size"] = GLOBAL_BATCH // (engine.world_size * num_micro_batches)
    sizes["eval_batches"] = GLOBAL_BATCH // sizes["micro_batch_size"]
    return make_trainer(engine, Masked(masks), sizes)


def train(num_micro_batches: int, masks: str = "some", steps: int = STEPS) -> TrainResult:
    return masked_trainer(start(), masks, num_micro_batches, steps).run()


def train_cuts(rank: int, world: int, is_weighted: bool, *numbers: int) -> list[TrainResult]:
    """Trains with each number of micro-batches on each rank."""
    with patch.object(session, "num_targets", session.num_targets if is_weighted else Tensor.numel):  # type: ignore[attr-defined]
        return [train(number) for number in numbers]


def losses(is_weighted: bool) -> np.ndarray[Any, Any]:
    """Training and validation loss after STEPS steps, [cut, 2]."""
    (one,), (two, other) = run_ranks(1, train_cuts, is_weighted, 1, 2, 4), run_ranks(2, train_cuts, is_weighted, 1, 4)
    assert [result.train_loss for result in two] == [result.train_loss for result in other]
    if is_weighted:
        source = Masked()
        targets = source.batch(source.order(0, np.arange(STEPS * GLOBAL_BATCH)))["targets"]
        assert {result.tokens for result in one + two + other} == {int((targets != IGNORE_INDEX).sum())}
    return np.array([(result.train_loss, result.val_losses["val_loss"]) for result in one + two])


@pytest.mark.processes
def test_every_cut_of_a_global_batch_has_the_same_loss() -> None:
    found = losses(is_weighted=True)
    np.testing.assert_allclose(found, found[:1].repeat(len(found), axis=0), rtol=3e-6)
    unweighted = losses(is_weighted=False)
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
    for num_micro_batches in (1, 8):
        assert train(num_micro_batches, steps=1).train_loss == pytest.approx(expected.item(), rel=1e-6)


def test_a_step_and_a_validation_without_targets() -> None:
    engine = start()
    before = engine.master_state()
    with pytest.raises(ConfigError, match="no target of the validation data counts"):
        masked_trainer(engine, "all", 2, steps=1).run()
    assert (engine.attempted_steps, engine.applied_steps) == (1, 0)
    assert all(torch.equal(before[name], value) for name, value in engine.master_state().items())


def test_a_validation_micro_batch_without_targets_does_not_count() -> None:
    def mean(net: Any, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:  # NaN without targets
        return {"loss": F.cross_entropy(net.inner(tokens).logits.flatten(0, 1), targets.flatten())}

    engine = dtrain.initialize(Net(mean, inner=model()), precision="fp32", seed=0)
    with engine.eval():
        assert math.isnan(engine(**{name: tensor[:1] for name, tensor in first_batch().items()})["loss"].item())
    sizes = (1, 4, 12)
    found = [validate(engine, Language(VOCAB), validation_batches(Masked(), n, 24 // n))["loss"] for n in sizes]
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)


MICRO = 2
GROWTH = BatchGrowth.of({0: 4, 3: 8}, {0: 2, 2: 4, 4: 8}, LENGTH)
SIZES = [(4, 2), (4, 2), (4, 4), (8, 4), (8, 8)]


def train_growing(rank: int, world: int, name: str) -> tuple[list[Any], dict[bool, list[tuple[int, ...]]], int]:
    """Trains; returns the metrics of the steps, the shapes that the model sees in training or not, and the tokens."""
    shapes: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
    built = model()
    built.register_forward_pre_hook(
        lambda module, _, inputs: shapes[module.training].append(tuple(inputs["tokens"].shape)), with_kwargs=True
    )
    growth = {"global_batch_size": {0: 4, 3: 8}, "seq_len": {0: 2, 2: 4, 4: 8}, "micro_batch_size": MICRO}
    sizes = {**growth, "steps": len(SIZES), "eval_every": 2, "eval_batches": 3}
    sink = Mock()
    with patch.object(StepEngine, "backward", autospec=True, side_effect=StepEngine.backward) as backward:
        result = make_trainer(start(name, built), Masked("none"), sizes, prefetch=1, sink=sink).run()
    assert {call.kwargs["weight"] for call in backward.call_args_list} == {1.0}
    return [call.args[0] for call in sink.step.call_args_list], shapes, result.tokens


@cache
def grown_with(name: str) -> tuple[list[Any], dict[bool, list[tuple[int, ...]]], int]:
    return cast(Any, run_ranks(1, train_growing, name)[0])


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", ["native", "fsdp2", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("ddp", "deepspeed"))]
)
def test_each_step_has_its_batch(name: str) -> None:
    steps, shapes, num_tokens = grown_with(name)
    expected = [[(MICRO * LENGTH // length, length)] * (size // MICRO) for size, length in SIZES]
    assert shapes[True] == [shape for own in expected for shape in own]
    assert set(shapes[False]) == {(MICRO, LENGTH)}, "whole samples"
    assert [(metrics.global_batch_size, metrics.seq_len) for metrics in steps] == SIZES
    tokens = [LENGTH * sum(size for size, _ in SIZES[: step + 1]) for step in range(len(SIZES))]
    assert [metrics.tokens for metrics in steps] == tokens
    assert num_tokens == GROWTH.num_tokens(0, len(SIZES)) == tokens[-1]
    losses = [metrics.loss for metrics in steps]
    assert losses == pytest.approx([metrics.loss for metrics in grown_with("native")[0]], rel=1e-5)


def test_flops_follow_the_length_of_each_step() -> None:
    by_seq_len = {2: (10, 12), 4: (11, 14), 8: (13, 18)}
    expected = [sum(size * LENGTH * by_seq_len[length][n] for size, length in SIZES[1:]) for n in range(2)]
    assert [*flops_between(GROWTH, by_seq_len, 1, len(SIZES))] == expected
    constant = RunConfig().batch_growth
    assert [constant.at(step) for step in (0, 10**6)] == [constant.phases[0]] * 2
    assert (constant.at(0).global_batch_size, constant.at(0).seq_len) == (16, 256)
