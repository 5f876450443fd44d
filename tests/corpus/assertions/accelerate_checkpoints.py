"""What accelerate's tests state of checkpoints: a run that was stopped and resumed is one that never stopped."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import StepLR

import dtrain
from tests.corpus.rows import assertion
from tests.engines.helpers import state_digests, train_step
from tests.engines.matrix import Trial

MICRO_BATCHES = 6


def losses_of(engine: Any, number: int) -> list[float]:
    return [train_step(engine, MICRO_BATCHES).loss for _ in range(number)]


@assertion(
    "huggingface/accelerate tests/test_state_checkpointing.py::test_can_resume_training",
    "Training that is resumed from a checkpoint ends with the same weights, optimizer states and random numbers "
    "as training without a stop.",
)
def a_run_that_is_resumed_has_the_bits_of_one_that_never_stopped(trial: Trial) -> None:
    """With dropout, into a model of other weights; the resumed engine has taken steps of its own before."""
    engine = trial.start(dropout=0.3)
    losses = losses_of(engine, 2)
    engine.save(trial.folder)
    losses += losses_of(engine, 2)
    resumed = trial.start(dropout=0.3, seed=9)
    assert losses_of(resumed, 1) != losses[:1]
    resumed.load(trial.folder)
    assert losses_of(resumed, 2) == losses[2:]
    assert state_digests(resumed) == state_digests(engine)


@assertion(
    "huggingface/accelerate tests/test_state_checkpointing.py::test_with_scheduler",
    "Loading a checkpoint sets the learning-rate scheduler back to its state at the time of the save.",
)
def a_load_sets_the_rate_back_to_that_of_the_checkpoint(trial: Trial) -> None:
    """In the engine that trained on, and in another one."""
    schedule = dtrain.TorchSchedule(StepLR, step_size=1, gamma=0.5)
    engine, other = (trial.start(schedule=schedule, optimizer=dtrain.AdamW(lr=0.5**8)) for _ in range(2))
    rates = [train_step(engine, trial.ranks).lr]
    engine.save(trial.folder)
    rates += [train_step(engine, trial.ranks).lr for _ in range(3)]
    assert rates == [0.5 ** (8 + step) for step in range(4)]
    for loaded in (engine, other):
        loaded.load(trial.folder)
        assert [train_step(loaded, trial.ranks).lr for _ in range(2)] == rates[1:3]
