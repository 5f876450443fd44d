"""Runs that go on from a checkpoint: the order of their samples, their random numbers, and running statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.data.dataset import SampleSource
from dtrain.data.loader import BatchLoader
from dtrain.data.sampling import Indices
from tests.corpus.rows import fault
from tests.corpus.training import seeded, start
from tests.engines.matrix import Trial
from tests.helpers.oracle import assert_close_to_largest

SEED, SAMPLES, STEP = 3, 10, 6  # an epoch is no whole number of steps


@dataclass
class Numbers(SampleSource):
    """Samples that are drawn from their id; remembers which were read."""

    seen: list[int] = field(default_factory=list)

    @property
    def num_samples(self) -> int:
        return SAMPLES

    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        self.seen += sample_ids.tolist()
        draws = [torch.randn(3, generator=torch.Generator().manual_seed(sample)) for sample in sample_ids.tolist()]
        return {"x": torch.stack(draws)}


class Dropped(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden, self.dropout, self.head = nn.Linear(3, 16), nn.Dropout(dropout), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(self.dropout(torch.tanh(self.hidden(x)))) - 1.0).float().square().mean()


def train(engine: Any, num_steps: int) -> tuple[list[int], list[float]]:
    """Trains on where the engine's cursor is; returns the ids of this rank's samples and the losses of the steps."""
    source = Numbers()
    loader = BatchLoader(source, SEED, 1, STEP // engine.world_size, engine.rank, engine.world_size, engine.data_cursor)
    losses = []
    for _ in range(num_steps):
        for micro_batch in engine.accumulate(next(loader)):
            engine.backward(engine(**micro_batch))
        engine.data_cursor = loader.cursor
        losses.append(engine.step().loss)
    return source.seen, losses


def resumed(trial: Trial, build: Callable[[], nn.Module], num_steps: int) -> tuple[Any, Any]:
    """An engine that has saved after a number of steps, and a new one of another seed that has loaded that."""
    first, second = start(trial, seeded(build)), start(trial, seeded(build), seed=1)
    train(first, num_steps)
    first.save(trial.folder / "saved")
    second.load(trial.folder / "saved")
    return first, second


@fault(
    "huggingface/accelerate#2016",
    "A run that is interrupted in its second epoch continues in the order of the first, and repeats and omits samples.",
    peers="accelerate",
)
def a_resume_within_the_second_epoch_goes_on_with_its_order(trial: Trial) -> None:
    first, second = resumed(trial, Dropped, num_steps=2)
    assert second.data_cursor == 12
    (seen, losses), (seen_again, losses_again) = train(first, 2), train(second, 2)
    assert seen == seen_again
    assert losses == pytest.approx(losses_again, rel=1e-5)
    source = Numbers()
    order = BatchLoader(source, SEED, 1, STEP)
    for _ in range(5):
        next(order)
    epochs = [source.seen[epoch * SAMPLES : (epoch + 1) * SAMPLES] for epoch in range(3)]
    assert all(Counter(epoch) == Counter(range(SAMPLES)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3, "each epoch has an order of its own"
    assert seen == source.seen[12:24][first.rank :: first.world_size], "the ranks share what one rank would have read"


@fault(
    "huggingface/transformers#17032",
    "Random states are saved at the end of an epoch and not loaded, so that a resumed run draws other numbers.",
    peers="transformers before 4.19",
)
def dropout_goes_on_after_a_resume_as_if_nothing_had_been(trial: Trial) -> None:
    """Up to rounding: with ``ddp`` a new engine sums its first step over three ranks in another order."""
    first, second = resumed(trial, lambda: Dropped(0.5), num_steps=1)
    torch.manual_seed(7)  # the loop's own random state is another after a restart
    (_, losses), before = train(first, 2), first.master_state()
    torch.manual_seed(8)
    assert losses == pytest.approx(train(second, 2)[1], rel=1e-5)
    assert_close_to_largest(second.master_state(), before, 1e-5)


class Normalized(nn.Module):
    """Frozen layers, one of which updates its running statistics, below a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).requires_grad_(False)
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x))).float().square().mean()


@fault(
    "huggingface/peft#1732",
    "Running statistics in a frozen base model move in training and are not saved; a loaded model gives other outputs.",
    peers="PEFT",
)
def running_statistics_of_frozen_layers_are_saved(trial: Trial) -> None:
    first, second = start(trial, seeded(Normalized)), start(trial, seeded(Normalized))
    draw = torch.Generator().manual_seed(trial.rank)
    for _ in range(2):
        first.backward(first(x=torch.randn(4, 3, generator=draw) + 2.0))
        assert first.step().applied
    first.copy_buffers()
    first.save(trial.folder / "saved")
    second.load(trial.folder / "saved")
    x, norms = torch.ones(2, 3), [engine.module.base[1] for engine in (first, second)]
    with first.eval(), second.eval():
        assert torch.equal(first(x=x), second(x=x))
    assert norms[0].running_mean.abs().sum() > 0
    assert all(torch.equal(*pair) for pair in zip(norms[0].buffers(), norms[1].buffers(), strict=True))
