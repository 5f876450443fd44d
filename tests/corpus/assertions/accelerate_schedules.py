"""What accelerate's tests state of learning rates: they follow updates, not micro-batches, ranks or skipped steps."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

import dtrain
from tests.corpus.assertions.accelerate_micro_batches import micro_batches, regression
from tests.corpus.faults.loops_schedules import a_skipped_step_does_not_advance_the_schedule
from tests.corpus.rows import assertion
from tests.corpus.training import start, step_of
from tests.engines.checks.skips import skips_a_bad_number_on_all_ranks_and_nothing_of_it_is_left
from tests.engines.matrix import Trial

RATE = 0.01


def rates_of(trial: Trial, schedule: Any, numbers: list[int]) -> list[float]:
    """The rates of steps with these numbers of micro-batches a rank."""
    engine = start(trial, regression(), optimizer=dtrain.AdamW(lr=RATE), schedule=schedule)
    return [step_of(engine, micro_batches([1] * number * trial.ranks)).lr for number in numbers]


def rates_of_torch(function: Any, number: int) -> list[float]:
    """The rates of as many updates of torch's optimizer under torch's scheduler."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler, rates = LambdaLR(optimizer, function), []
    for _ in range(number):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def root(step: int) -> float:
    return float((step + 1) ** -0.65)


@assertion(
    "huggingface/accelerate src/accelerate/test_utils/scripts/test_sync.py::"
    "test_gradient_accumulation_with_opt_and_scheduler",
    "With gradient accumulation, each update has the learning rate of the same update in one process without it.",
)
def the_rate_advances_once_an_update_whatever_its_micro_batches(trial: Trial) -> None:
    want = rates_of_torch(root, 4)
    assert len(set(want)) == 4
    for numbers in ([1, 1, 1, 1], [2, 1, 2, 1]):
        for schedule in (dtrain.Schedule(root), dtrain.TorchSchedule(partial(LambdaLR, lr_lambda=root))):
            assert rates_of(trial, schedule, numbers) == want, (numbers, schedule)


@assertion(
    "huggingface/accelerate tests/test_scheduler.py::test_accumulation",
    "A linear schedule reaches zero after exactly its number of updates, with 1, 2 and 4 micro-batches an update.",
)
def a_linear_schedule_ends_after_its_updates_whatever_their_micro_batches(trial: Trial) -> None:
    """And an update at the rate of zero changes no weight, by decay or by old moments either."""
    schedule = dtrain.Linear(warmup_steps=0, total_steps=3, min_ratio=0.0)
    for number in (1, 2, 4):
        engine = start(trial, regression(), optimizer=dtrain.AdamW(lr=RATE), schedule=schedule)
        pairs = micro_batches([1] * number * trial.ranks)
        rates = [step_of(engine, pairs).lr for _ in range(3)]
        assert all(math.isclose(rate, RATE * (3 - step) / 3) for step, rate in enumerate(rates)), rates
        before = engine.master_state()
        assert step_of(engine, pairs).lr == 0.0
        assert all(torch.equal(master, before[name]) for name, master in engine.master_state().items())


assertion(
    "huggingface/accelerate tests/test_optimizer.py::test_accelerated_optimizer_step_was_skipped",
    "A step whose gradients have a NaN is reported as skipped, and the next one with finite gradients is not.",
)(skips_a_bad_number_on_all_ranks_and_nothing_of_it_is_left)

assertion(
    "huggingface/accelerate tests/test_scheduler.py::test_lambda_scheduler_steps_with_optimizer_multiprocess",
    "A step that the optimizer skips because of an overflow does not advance the learning rate.",
)(a_skipped_step_does_not_advance_the_schedule)
