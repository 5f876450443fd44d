"""Training scripts for accelerate, in the shape of its basic examples; any Accelerator runs them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.launch import rank_variables

F = nn.functional


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 4))


def samples(count: int, seed: int = 1) -> TensorDataset:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :4].argmax(dim=1))


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The groups that transformers' Trainer makes, the second with a learning rate of its own."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 4e-3},
    ]


@dataclass
class Script:
    """What a script trains; ``optimizer`` takes the model."""

    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.AdamW(
        model.parameters(), lr=2e-2, weight_decay=0.1
    )
    drop_last: bool = False
    epochs: int = 2
    max_norm: float | None = None


@dataclass
class History:
    """What a script saw."""

    losses: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def loader_options() -> dict[str, Any]:
    """Options that make the order of samples a function of the epoch, so that a run can resume inside one."""
    return {"cpu": True, "dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5)}


def run(
    accelerator: Any, script: Script, *, save_at: int = 0, folder: str = "", resume_at: int = 0, seed: int = 0
) -> History:
    """Trains and evaluates; saves after batch ``save_at`` and ends, or resumes after batch ``resume_at``."""
    model = build(seed)
    optimizer = script.optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
    train = DataLoader(samples(38), batch_size=4, shuffle=True, drop_last=script.drop_last)
    test = DataLoader(samples(11, seed=2), batch_size=4)
    model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)
    if resume_at:
        accelerator.load_state(folder)
    history, batch = History(), resume_at
    for epoch in range(resume_at // len(train), script.epochs):
        model.train()
        first = batch - epoch * len(train)
        batches = accelerator.skip_first_batches(train, first) if first else train
        batches.set_epoch(epoch)
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                norm = None
                if script.max_norm is not None and accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), script.max_norm)
                optimizer.step()
                if accelerator.optimizer_step_was_skipped:
                    history.skipped.append(batch)
                scheduler.step()
                optimizer.zero_grad()
            history.losses.append(loss.item())
            history.lrs.append(scheduler.get_last_lr()[0])
            if norm is not None:
                history.norms.append(norm.item())
            batch += 1
            if batch == save_at:
                accelerator.save_state(folder)
                return history
        history.accuracies.append(evaluate(accelerator, model, test))
    history.weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return history


def evaluate(accelerator: Any, model: nn.Module, loader: Any) -> float:
    """Returns the share of right predictions over the whole set, each sample once."""
    model.eval()
    right, total = 0, 0
    for x, y in loader:
        with torch.no_grad():
            predictions = model(x).argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, y))
        right += int((predictions == labels).sum())
        total += len(labels)
    assert total == len(loader.dataset)
    return right / total


def reset_accelerate() -> None:
    """Forgets the state that accelerate keeps in a process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@contextmanager
def launched(rank: int, world: int) -> Iterator[None]:
    """The variables of a launcher, which accelerate reads; the process group exists."""
    with mock.patch.dict(os.environ, rank_variables(rank, world) if world > 1 else {}):
        reset_accelerate()
        yield
