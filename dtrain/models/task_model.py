"""A model that returns predictions, with the loss of a task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from dtrain.config.model import LOSS_KEYS, ModelConfig
from dtrain.errors import ConfigError, ModelError
from dtrain.tasks import Classification, Task, TaskOutput


class TaskModel(nn.Module):
    """Calls ``model`` with the inputs of a batch, and computes the loss of ``task`` in FP32.

    Args:
        model: takes the inputs as positional arguments in the order of the batch; returns a prediction, or an object
            with ``logits``.
        trained: the task in training, whose loss may be another; None: the same.
    """

    def __init__(self, model: nn.Module, task: Task, trained: Task | None = None) -> None:
        super().__init__()
        self.model = model
        self.task = task
        self._trained = trained or task

    @staticmethod
    def of(model: nn.Module, task: Task, config: ModelConfig) -> TaskModel:
        """Returns ``model`` with the loss of ``task`` under the keys of ``config``.

        Raises:
            ConfigError: a key of the loss is set that the task has not.
        """
        for name in LOSS_KEYS:
            value = getattr(config, name)
            if value != getattr(ModelConfig, name) and (name, task.name) != ("label_smoothing", "classification"):
                raise ConfigError(f"model.{name}={value} has no effect on {task.name}; remove it")
        if isinstance(task, Classification):
            return TaskModel(model, task, replace(task, label_smoothing=config.label_smoothing))
        return TaskModel(model, task)

    def forward(self, targets: Tensor | None = None, **inputs: Tensor) -> TaskOutput:
        """Returns prediction and loss for a batch (``dtrain.tasks.task``).

        Raises:
            ModelError: the model returns something else, or a prediction of another shape than the task needs.
        """
        output: Any = self.model(*inputs.values())
        prediction = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if not isinstance(prediction, Tensor):
            raise ModelError(
                f"{type(self.model).__name__} returned a {type(output).__name__}; for {self.task.name} a model returns "
                "a tensor, or an object with logits"
            )
        prediction = prediction.float()
        task = self._trained if self.training else self.task
        return TaskOutput(prediction, None if targets is None else task.loss(prediction, targets))
