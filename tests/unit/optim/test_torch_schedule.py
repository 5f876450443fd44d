"""Schedulers of torch give torch's own learning rates, one for each applied step."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LinearLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

import dtrain
from dtrain.errors import ConfigError
from dtrain.optim.torch_schedule import TorchSchedule
from tests.helpers.one_rank import loss_of, start, train_step

LR = 3e-3
STEPS = 12
ONE_CYCLE: dict[str, Any] = {"max_lr": 0.02, "total_steps": 20, "cycle_momentum": False}


def warm_then_cosine(optimizer: Optimizer) -> LRScheduler:
    warm_up: LRScheduler = LinearLR(optimizer, 0.1, total_iters=4)
    cosine: LRScheduler = lr_scheduler.CosineAnnealingLR(optimizer, 8, eta_min=1e-5)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[4])


def chained(optimizer: Optimizer) -> LRScheduler:
    parts = [LinearLR(optimizer, 0.5, total_iters=3), ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


SCHEDULERS: list[tuple[Callable[..., LRScheduler], dict[str, Any]]] = [
    (OneCycleLR, ONE_CYCLE),
    (lr_scheduler.CosineAnnealingWarmRestarts, {"T_0": 3, "T_mult": 2, "eta_min": 1e-4}),
    (LambdaLR, {"lr_lambda": lambda step: 1 / (step + 1)}),
    (lr_scheduler.CyclicLR, {"base_lr": 1e-3, "max_lr": 1e-2, "step_size_up": 3, "cycle_momentum": False}),
    (warm_then_cosine, {}),
    (chained, {}),
]


def torchs_lrs(scheduler: Callable[..., LRScheduler], options: dict[str, Any], steps: int = STEPS) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR)
    found, made = [], scheduler(optimizer, **options)
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    return found


@pytest.mark.parametrize(("scheduler", "options"), SCHEDULERS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_learning_rates_are_torchs(scheduler: Callable[..., LRScheduler], options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        schedule = TorchSchedule(scheduler, **options).with_base_lr(LR)
    expected = torchs_lrs(scheduler, options)
    assert len({*expected}) > 3
    for step in [*range(STEPS), 5, 0, 11, 11]:  # going back too, as a load does
        assert LR * schedule.factor(step) == pytest.approx(expected[step], rel=1e-15)


def test_an_engine_follows_applied_steps(tmp_path: Path) -> None:
    expected = torchs_lrs(OneCycleLR, ONE_CYCLE)
    engine = start(optimizer=dtrain.AdamW(lr=LR), schedule=dtrain.TorchSchedule(OneCycleLR, **ONE_CYCLE))
    for step in range(4):
        assert train_step(engine).lr == pytest.approx(expected[step], rel=1e-15)
    engine.backward(loss_of(engine) * math.inf)
    skipped = engine.step()
    assert (skipped.applied, skipped.lr) == (False, pytest.approx(expected[4], rel=1e-15))
    engine.save(tmp_path)
    for _ in range(2):
        assert train_step(engine).lr == pytest.approx(expected[4], rel=1e-15)
        engine.load(tmp_path)


def test_groups_take_schedules_of_every_kind() -> None:
    groups = {
        "0": {"schedule": dtrain.TorchSchedule(LambdaLR, lr_lambda=lambda step: 1.0)},
        "2": {"schedule": dtrain.Schedule(lambda step: 0.0)},
    }
    engine = start(optimizer=dtrain.AdamW(lr=LR, groups=groups), schedule=dtrain.Schedule(lambda step: 0.0))
    before = engine.master_state()
    assert train_step(engine).lr == 0.0
    after = engine.master_state()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"0.weight", "0.bias"}


def test_ranks_compare_its_values() -> None:
    schedule = TorchSchedule(LambdaLR, lr_lambda=lambda step: 1 / (step + 1)).with_base_lr(LR)
    assert json.loads(json.dumps(asdict(schedule))) == {
        "samples": pytest.approx([1, 1 / 2, 1 / 3, 1 / 11, 1 / 101, 1 / 1001]),
        "base_lr": LR,
    }
    assert schedule != TorchSchedule(LambdaLR, lr_lambda=lambda step: 1 / (step + 2)).with_base_lr(LR)


def test_a_scheduler_that_ends_says_so_at_its_end() -> None:
    schedule = TorchSchedule(OneCycleLR, **ONE_CYCLE).with_base_lr(LR)
    for _ in range(2):
        with pytest.raises(ConfigError, match="fails at step 21: ValueError: Tried to step 21 times"):
            schedule.factor(21)
    assert LR * schedule.factor(19) == pytest.approx(torchs_lrs(OneCycleLR, ONE_CYCLE, 20)[19], rel=1e-15)


def other_optimizer(optimizer: Optimizer) -> LRScheduler:
    return LinearLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR))


class DecayScheduler(LRScheduler):
    """Changes the weight decay at its third step."""

    def get_lr(self) -> list[float | torch.Tensor]:
        if self.last_epoch == 2:
            self.optimizer.param_groups[0]["weight_decay"] = 0.5
        return [LR]


@pytest.mark.parametrize(
    ("scheduler", "options", "message"),
    [
        (ReduceLROnPlateau, {}, r"step of ReduceLROnPlateau needs metrics.*if outcome\.applied: scheduler\.step"),
        (OneCycleLR, {"max_lr": 0.1, "total_steps": 9}, "OneCycleLR also changes betas.*give cycle_momentum=False"),
        (DecayScheduler, {}, "DecayScheduler also changes weight_decay"),
        (OneCycleLR, {"max_lr": 0.1}, "OneCycleLR cannot be built: ValueError"),
        (other_optimizer, {}, "returned .*; expected a scheduler of torch for the optimizer that it was given"),
        (LambdaLR, {"lr_lambda": lambda step: -1.0}, "returns -1 at step 0; expected a finite number >= 0"),
        ("OneCycleLR", {}, r"TorchSchedule\(OneCycleLR\) takes a class and its options"),
        (LinearLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))])), {}, "takes a class and its options"),
    ],
)
def test_others_are_refused(scheduler: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        TorchSchedule(scheduler, **options)
