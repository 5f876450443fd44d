from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.cli.resolve import read_suite
from dtrain.config.commands import PROBE
from dtrain.config.precision import LossScale
from dtrain.config.probe import ProbeConfig
from dtrain.config.schema import RunConfig
from dtrain.data import Dataset, load_dataset
from dtrain.measure.probe.noise import MicroBatches, cosine, load_steps, noise_of, perturb_by_an_ulp
from dtrain.measure.probe.trials import FormatTraining, interleave, train
from tests.helpers.probed_models import FACTORY, TINY

CPU = torch.device("cpu")
Steps = list[MicroBatches]


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
    return load_steps(config.training("fp32"), dataset)


def start(config: RunConfig, dataset: Dataset, **options: Any) -> FormatTraining:
    return FormatTraining(config, dataset.task, CPU, **options)


def at_scale(config: RunConfig, **scale: Any) -> RunConfig:
    return replace(config, precision=replace(config.precision, loss_scale=LossScale(**scale)))


def test_formats_start_equal_and_train_on_the_same_samples(config: ProbeConfig, dataset: Dataset, steps: Steps) -> None:
    names = ("fp32", "fp32", "bf16", "fp16", "fp8")
    trainings = [start(config.training(name), dataset) for name in names]
    _, cosines = interleave(trainings, steps)
    first, second, *others = trainings
    assert len(first.losses) == config.steps
    assert first.losses == second.losses
    assert cosines[:2] == pytest.approx([1.0, 1.0], abs=1e-12)
    assert all(0.98 < found < 1.0 for found in cosines[2:])
    for other in others:
        assert other.losses != first.losses
        assert other.losses == pytest.approx(first.losses, rel=0.02)


def test_a_step_that_overflows_repeats_with_equal_dropout(config: ProbeConfig, dataset: Dataset, steps: Steps) -> None:
    low = start(at_scale(config.training("fp16"), mode="static", init=256.0), dataset)
    high = start(at_scale(config.training("fp16"), mode="dynamic", init=2.0**24), dataset)
    first, _ = interleave([low, high], steps)
    assert low.skipped == 0
    assert 0 < high.skipped < 20
    assert high.losses == pytest.approx(low.losses, rel=2e-3)
    assert high.losses[0] == low.losses[0]
    assert high.engine.attempted_steps == high.engine.applied_steps == len(steps)
    again = start(config.training("fp16"), dataset)
    assert train(again, steps, first) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("kind", "reason"), [("overflow", "forward loss is "), ("raises", "RuntimeError: this layer")])
def test_a_model_that_fails_in_fp16_is_a_failed_trial(
    kind: str, reason: str, config: ProbeConfig, dataset: Dataset, steps: Steps
) -> None:
    names = ("fp32", "bf16", "fp16")
    runs = (replace(run, model=replace(run.model, args={"kind": kind})) for run in map(config.training, names))
    trainings = [start(run, dataset) for run in runs]
    _, cosines = interleave(trainings, steps)
    found = [training.trial(trainings[0].final_loss, c) for training, c in zip(trainings, cosines, strict=True)]
    assert [trial.failure for trial in found[:2]] == [None, None]
    assert str(found[2].failure).startswith(f"step 1: {reason}")
    assert (found[2].gap, found[2].losses, math.isnan(found[2].cosine)) == (math.inf, [], True)


def test_noise_is_the_standard_deviation_with_the_reference() -> None:
    found = noise_of(2.0, [2.0 + 2.0**-9], [1.0, 3.0])
    assert found.rounding == pytest.approx(2.0**-9 / math.sqrt(2))
    assert found.seed == pytest.approx(1.0)
    assert found.detection_limit == pytest.approx(2 * math.hypot(1.0, 2.0**-9 / math.sqrt(2)))


def test_weights_move_by_an_ulp() -> None:
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 2))
    model[1].requires_grad_(False)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    perturb_by_an_ulp(model, seed=3)
    after = [parameter.detach() for parameter in model.parameters()]
    for old, new in zip(before[:2], after[:2], strict=True):
        up, down = (torch.nextafter(old, torch.full_like(old, limit)) for limit in (math.inf, -math.inf))
        assert bool(((new == up) | (new == down)).all())
        assert bool((new == up).any())
        assert bool((new == down).any())
    assert all(map(torch.equal, before[2:], after[2:]))


def test_cosine_of_all_tensors_together() -> None:
    a = {"x": torch.tensor([[3.0]]), "y": torch.tensor([0.0, 4.0])}
    b = {"y": torch.tensor([1.0, 0.0]), "x": torch.tensor([[1.0]])}
    assert cosine(a, b) == pytest.approx(3 / (5 * math.sqrt(2)))
    assert cosine({name: 1e-30 * value for name, value in a.items()}, a) == pytest.approx(1.0)
    assert math.isnan(cosine({name: value * math.inf for name, value in a.items()}, b))
    assert math.isnan(cosine({name: 0 * value for name, value in a.items()}, b))
