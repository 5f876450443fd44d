"""A training whose batch grows: the shapes that the model sees, weights, tokens and metrics of each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import dtrain
from dtrain.config.growth import BatchGrowth
from dtrain.config.model import GPT2_FACTORY, ModelConfig
from dtrain.config.schema import CheckpointConfig, RunConfig, TrainConfig
from dtrain.data import BatchLoader, SampleSource, validation_batches
from dtrain.data.growing import GrowingBatches
from dtrain.data.sampling import Indices
from dtrain.engine.step import StepEngine
from dtrain.models import build_model
from dtrain.tasks import Language
from dtrain.telemetry.metrics import StepMetrics
from dtrain.telemetry.precision import PrecisionFindings
from dtrain.train.flops import flops_between
from dtrain.train.signals import StopSignals
from dtrain.train.trainer import SaveOptions, Trainer, TrainingData, TrainResult
from tests.helpers.ranks import run_ranks

VOCAB, LENGTH, MICRO, STEPS = 17, 8, 2, 5
GROWTH = BatchGrowth.of({0: 4, 3: 8}, {0: 2, 2: 4, 4: 8}, LENGTH)
SIZES = [(4, 2), (4, 2), (4, 4), (8, 4), (8, 8)]


class Random(SampleSource):
    num_samples = 40

    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        tokens = torch.randint(VOCAB, (self.num_samples, LENGTH + 1), generator=torch.Generator().manual_seed(0))
        tokens = tokens[torch.from_numpy(sample_ids)]
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


class Collected:
    """A sink that keeps the metrics."""

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []

    def step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)

    def validation(self, step: int, losses: Mapping[str, float]) -> None: ...

    def precision(self, findings: PrecisionFindings) -> None: ...

    def close(self, exit_code: int) -> None: ...


@dataclass
class Seen:
    """What a training has done in each step, and in validations."""

    result: TrainResult
    steps: list[StepMetrics]
    weights: list[float]
    trained: list[tuple[int, ...]]
    validated: list[tuple[int, ...]]


def train(rank: int, world: int, name: str) -> Seen:
    sink = Collected()
    weights: list[float] = []
    shapes: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
    backward = StepEngine.backward

    def recorded(self: StepEngine, loss: Any, *, weight: float) -> None:
        weights.append(weight)
        backward(self, loss, weight=weight)

    config = ModelConfig(num_layers=1, hidden_dim=16, num_heads=2, ffn_dim=16, max_seq_len=LENGTH, factory=GPT2_FACTORY)
    model = build_model(config, VOCAB, seed=1)
    model.register_forward_pre_hook(
        lambda module, _, inputs: shapes[module.training].append(tuple(inputs["tokens"].shape)), with_kwargs=True
    )
    engine = dtrain.initialize(model, optimizer=dtrain.AdamW(lr=1e-2), engine=name, precision="fp32", seed=0)
    loader = BatchLoader(Random(), 0, MICRO, GROWTH.at(0).global_batch_size // MICRO)
    data = TrainingData(
        GrowingBatches(loader, GROWTH, 0),
        lambda: validation_batches(Random(), MICRO, 3),
        Language(VOCAB),
        tokens_per_micro_batch=MICRO * LENGTH,
        growth=GROWTH,
        prefetch=1,
    )
    steps = TrainConfig(steps=STEPS, log_every=1, eval_every=2, save_every=0)
    saving = SaveOptions(Path("unused"), {}, {}, CheckpointConfig(asynchronous=False, save_at_end=False))
    with patch.object(StepEngine, "backward", recorded):
        result = Trainer(engine, data, steps, saving, stop=StopSignals(), sinks=[sink]).run()
    return Seen(result, sink.steps, weights, shapes[True], shapes[False])


@cache
def seen_with(name: str) -> Seen:
    (seen,) = run_ranks(1, train, name)
    return cast(Seen, seen)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["native", "fsdp2", "ddp", "deepspeed"])
def test_each_step_has_its_batch(name: str) -> None:
    seen = seen_with(name)
    assert set(seen.weights) == {1.0}
    expected = [[(MICRO * LENGTH // length, length)] * (size // MICRO) for size, length in SIZES]
    assert seen.trained == [shape for shapes in expected for shape in shapes]
    assert set(seen.validated) == {(MICRO, LENGTH)}, "whole samples"
    assert [(metrics.global_batch_size, metrics.seq_len) for metrics in seen.steps] == SIZES
    tokens = [LENGTH * sum(size for size, _ in SIZES[: step + 1]) for step in range(STEPS)]
    assert [metrics.tokens for metrics in seen.steps] == tokens
    assert seen.result.tokens == GROWTH.num_tokens(0, STEPS) == tokens[-1]
    losses = [metrics.loss for metrics in seen.steps]
    assert losses == pytest.approx([metrics.loss for metrics in seen_with("native").steps], rel=1e-5)


def test_flops_follow_the_length_of_each_step() -> None:
    by_seq_len = {2: 10, 4: 11, 8: 13}
    expected = sum(size * LENGTH * by_seq_len[length] for size, length in SIZES[1:])
    assert flops_between(GROWTH, by_seq_len, 1, STEPS) == expected


def test_a_run_without_growth_names_its_sizes_too() -> None:
    growth = RunConfig().batch_growth
    assert [growth.at(step) for step in (0, 10**6)] == [growth.phases[0]] * 2
    assert (growth.at(0).global_batch_size, growth.at(0).seq_len) == (16, 256)
