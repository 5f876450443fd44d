from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain.cli.resolve import read_suite
from dtrain.config.commands import PROBE
from dtrain.config.precision import LossScale
from dtrain.config.probe import ProbeConfig
from dtrain.config.schema import RunConfig
from dtrain.data import BatchLoader, Dataset, load_dataset
from dtrain.data.loader import Batch
from dtrain.measure.probe.trials import FormatTraining, cosine, interleave
from dtrain.tasks import IGNORE_INDEX
from tests.helpers.probed_models import FACTORY, TINY

CPU = torch.device("cpu")
Steps = list[Batch]


@pytest.fixture(scope="module")
def config() -> ProbeConfig:
    found = read_suite([*TINY, FACTORY, "model.dropout=0.2", "model.compile=blocks"], PROBE)
    assert found is not None
    assert found.training("fp8").model.compile == "none"
    return found


@pytest.fixture(scope="module")
def dataset(config: ProbeConfig) -> Dataset:
    return load_dataset(config.data, config.model.max_seq_len)


@pytest.fixture(scope="module")
def steps(config: ProbeConfig, dataset: Dataset) -> Steps:
    train = config.train
    num_micro_batches = train.global_batch_size // train.micro_batch_size
    loader = BatchLoader(dataset.train, config.seed, train.micro_batch_size, num_micro_batches)
    return list(islice(loader, config.steps))


def start(config: RunConfig, dataset: Dataset, first: dict[str, Tensor]) -> FormatTraining:
    return FormatTraining(config, dataset, CPU, first)


def at_scale(config: RunConfig, **scale: Any) -> RunConfig:
    return replace(config, precision=replace(config.precision, loss_scale=LossScale(**scale)))


def test_formats_start_equal_and_train_on_the_same_samples(config: ProbeConfig, dataset: Dataset, steps: Steps) -> None:
    names = ("fp32", "fp32", "bf16", "fp16", "fp8")
    gradients: dict[str, Tensor] = {}
    trainings = [start(config.training(name), dataset, gradients) for name in names]
    interleave(trainings, steps)
    cosines = [training.cosine for training in trainings]
    first, second, *others = trainings
    assert len(first.losses) == config.steps
    assert first.losses == second.losses
    assert cosines[:2] == pytest.approx([1.0, 1.0], abs=1e-12)
    assert all(0.98 < found < 1.0 for found in cosines[2:])
    for other in others:
        assert other.losses != first.losses
        assert other.losses == pytest.approx(first.losses, rel=0.02)


def test_a_step_that_overflows_repeats_with_equal_dropout(config: ProbeConfig, dataset: Dataset, steps: Steps) -> None:
    first: dict[str, Tensor] = {}
    low = start(at_scale(config.training("fp16"), mode="static", init=256.0), dataset, first)
    high = start(at_scale(config.training("fp16"), mode="dynamic", init=2.0**24), dataset, first)
    interleave([low, high], steps)
    assert low.skipped == 0
    assert 0 < high.skipped < 20
    assert high.losses == pytest.approx(low.losses, rel=2e-3)
    assert high.losses[0] == low.losses[0]
    assert high.engine.attempted_steps == high.engine.applied_steps == len(steps)
    assert high.cosine == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("kind", "reason"), [("overflow", "forward loss is "), ("raises", "RuntimeError: this layer")])
def test_a_model_that_fails_in_fp16_is_a_failed_trial(
    kind: str, reason: str, config: ProbeConfig, dataset: Dataset, steps: Steps
) -> None:
    names = ("fp32", "bf16", "fp16")
    runs = (replace(run, model=replace(run.model, args={"kind": kind})) for run in map(config.training, names))
    first: dict[str, Tensor] = {}
    trainings = [start(run, dataset, first) for run in runs]
    interleave(trainings, steps)
    found = [training.trial(2.0) for training in trainings]
    assert [trial.failure for trial in found[:2]] == [None, None]
    assert str(found[2].failure).startswith(f"step 1: {reason}")
    assert (found[2].gap, found[2].losses, math.isnan(found[2].cosine)) == (math.inf, [], True)


def test_the_loss_is_the_mean_over_the_targets_that_count(config: ProbeConfig, dataset: Dataset, steps: Steps) -> None:
    batch = [{name: values.clone() for name, values in micro.items()} for micro in steps[0]]
    batch[0]["targets"][:, 1:] = IGNORE_INDEX
    plain = replace(config, model=replace(config.model, dropout=0.0)).training("fp32")
    training = start(plain, dataset, {})
    with torch.no_grad():
        losses = [float(training.plain_model()(**micro).loss) for micro in batch]
    numbers = [int((micro["targets"] != IGNORE_INDEX).sum()) for micro in batch]
    assert numbers == [2, 32]
    training.step(batch)
    assert training.losses == [pytest.approx((losses[0] * 2 + losses[1] * 32) / 34, rel=1e-6)]


def test_cosine_of_all_tensors_together() -> None:
    a = {"x": torch.tensor([[3.0]]), "y": torch.tensor([0.0, 4.0])}
    b = {"y": torch.tensor([1.0, 0.0]), "x": torch.tensor([[1.0]])}
    assert cosine(a, b) == pytest.approx(3 / (5 * math.sqrt(2)))
    assert cosine({name: 1e-30 * value for name, value in a.items()}, a) == pytest.approx(1.0)
    assert math.isnan(cosine({name: value * math.inf for name, value in a.items()}, b))
    assert math.isnan(cosine({name: 0 * value for name, value in a.items()}, b))
