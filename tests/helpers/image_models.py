"""Models of images and numbers with batches for them, and factories of a user, such as ``plain``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import dtrain
from dtrain.config.model import USED_KEYS, ModelConfig
from dtrain.models import build_model
from dtrain.models.task_model import TaskModel
from dtrain.tasks import Classification, Task


def classification(*shape: int, classes: int = 5) -> Classification:
    return Classification(tuple(f"class {index}" for index in range(classes)), shape)


def build(kind: str, task: Task, **keys: Any) -> TaskModel:
    """Builds the model whose factory is in the module ``kind`` of ``dtrain.models``, with the loss of ``task``."""
    factory = next(factory for factory in USED_KEYS if factory == f"dtrain.models.{kind}:build")
    model = build_model(ModelConfig(name=kind.rpartition(".")[2], factory=factory, **keys), task, seed=0)
    assert isinstance(model, TaskModel)
    return model


def batch(task: Classification, size: int = 8, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "inputs": torch.randn(size, *task.input_shape, generator=generator),
        "targets": torch.randint(task.num_outputs, (size,), generator=generator),
    }


def train(engine: Any, task: Classification, steps: int = 3) -> list[float]:
    """Returns the losses of ``steps`` steps, each on a batch of its own."""
    losses = []
    for step in range(steps):
        loss = engine(**batch(task, seed=step)).loss
        losses.append(loss.item())
        engine.backward(loss)
        assert engine.step().applied
    return losses


def start(model: TaskModel, **options: Any) -> Any:
    settings: dict[str, Any] = {"precision": "fp32", "max_grad_norm": None, "seed": 0}
    settings["optimizer"] = dtrain.SGD(lr=0.1, momentum=0.9, weight_decay=0.0)
    return dtrain.initialize(model, **settings | options)


def plain(config: ModelConfig, task: Task) -> nn.Module:
    """A module without loss, as those of torchvision; ``model.args.more_outputs`` widens its head."""
    channels, height, width = task.input_shape
    num_outputs = task.num_outputs + config.args.get("more_outputs", 0)
    head = nn.Linear(4 * -(-height // 2) * -(-width // 2), num_outputs)
    return nn.Sequential(nn.Conv2d(channels, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), head)


class WithLogits(nn.Module):
    """Returns an object with ``logits``, as models of transformers do."""

    def __init__(self, config: ModelConfig, task: Task) -> None:
        super().__init__()
        self.inner = plain(config, task)

    def forward(self, pixel_values: Tensor) -> Any:
        return SimpleNamespace(logits=self.inner(pixel_values), hidden_states=None)


class Pair(WithLogits):
    """Returns a tuple, as models with auxiliary outputs do."""

    def forward(self, pixel_values: Tensor) -> Any:
        return self.inner(pixel_values), None
