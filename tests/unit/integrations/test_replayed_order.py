"""A run that resumes in the middle of an epoch sees the batches of the run that was never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from dtrain.integrations.accelerate import Accelerator
from tests.helpers.accelerate_loops import reset_accelerate

ROWS = TensorDataset(torch.arange(12.0)[:, None])
BATCHES, EPOCHS = 6, 3

LOADERS: dict[str, tuple[Callable[[], DataLoader[Any]], dict[str, Any]]] = {
    "shuffled": (lambda: DataLoader(ROWS, 2, shuffle=True), {}),
    "with a generator": (
        lambda: DataLoader(ROWS, 2, shuffle=True, generator=torch.Generator().manual_seed(torch.initial_seed())), {},
    ),
    "with replacement": (lambda: DataLoader(ROWS, 2, sampler=RandomSampler(ROWS, True, 12)), {}),
    "weighted": (lambda: DataLoader(ROWS, 2, sampler=WeightedRandomSampler(range(1, 13), 12)), {}),
    "subset": (lambda: DataLoader(ROWS, 2, sampler=SubsetRandomSampler(range(12))), {}),
    "seedable": (
        lambda: DataLoader(ROWS, 2, shuffle=True),
        {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True)},
    ),
    "dispatched": (
        lambda: DataLoader(ROWS, 2, shuffle=True),
        {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)},
    ),
    "sequential": (lambda: DataLoader(ROWS, 2), {}),
}  # fmt: skip


def run(
    name: str, folder: Path, *, kind: type = Accelerator, stop: int = 0, start: int = 0, seed: int = 3
) -> list[Any]:
    """Returns the batches up to ``stop``, or from ``start``, where it resumes; the last entry is the next number."""
    reset_accelerate()
    set_seed(seed)
    build, options = LOADERS[name]
    accelerator, model = kind(cpu=True, **options), torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), build())
    if start:
        accelerator.load_state(str(folder))
    seen: list[Any] = []
    first, skip = divmod(start, BATCHES)
    for epoch in range(first, EPOCHS):
        batches = accelerator.skip_first_batches(loader, skip) if skip and epoch == first else loader
        for (x,) in batches:
            accelerator.backward(model(x / 12).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            seen.append(x.flatten().tolist())
            if start + len(seen) == stop:
                accelerator.save_state(str(folder))
                return seen
    return [*seen, torch.rand(()).item()]


@pytest.mark.parametrize("name", LOADERS)
def test_a_resumed_run_sees_the_batches_of_the_whole_one(name: str, tmp_path: Path) -> None:
    whole = run(name, tmp_path)
    assert (whole[0] == whole[BATCHES]) is (name == "sequential")
    for stop in (2, BATCHES - 1, BATCHES, BATCHES + 4, 2 * BATCHES):
        head = run(name, tmp_path, stop=stop)
        rest = run(name, tmp_path, start=stop, seed=stop)
        assert head + rest == whole, stop
    # a resumed run that stops in the same epoch
    head = run(name, tmp_path, stop=BATCHES + 1)
    middle = run(name, tmp_path, start=BATCHES + 1, stop=BATCHES + 4, seed=5)
    assert head + middle + run(name, tmp_path, start=BATCHES + 4, seed=6) == whole


def test_the_order_is_that_of_plain_accelerate(tmp_path: Path) -> None:
    for name in LOADERS:
        assert run(name, tmp_path) == run(name, tmp_path, kind=accelerate.Accelerator)


def test_a_loader_that_is_not_prepared_skips_as_before() -> None:
    accelerator = Accelerator(cpu=True)
    assert [x.tolist() for (x,) in accelerator.skip_first_batches(DataLoader(ROWS, 4), 2)] == [
        [[8.0], [9.0], [10.0], [11.0]]
    ]
