"""Factories of a user for images: ``model.factory=tests.helpers.own_models:plain``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from dtrain.config.model import ModelConfig
from dtrain.tasks import Task


class WithLogits(nn.Module):
    """Returns an object with ``logits``, as models of transformers do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, pixel_values: Tensor) -> Any:
        return SimpleNamespace(logits=self.inner(pixel_values), hidden_states=None)


class Pair(WithLogits):
    """Returns a tuple, as models with auxiliary outputs do."""

    def forward(self, pixel_values: Tensor) -> Any:
        return self.inner(pixel_values), None


def plain(config: ModelConfig, task: Task) -> nn.Module:
    """A module without loss, as those of torchvision; ``model.args.more_outputs`` widens its head."""
    channels, height, width = task.input_shape
    num_outputs = task.num_outputs + config.args.get("more_outputs", 0)
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * -(-height // 2) * -(-width // 2), num_outputs),
    )


def with_logits(config: ModelConfig, task: Task) -> nn.Module:
    return WithLogits(plain(config, task))


def pair(config: ModelConfig, task: Task) -> nn.Module:
    return Pair(plain(config, task))
