"""A multilayer perceptron, as ``model=mlp``, for arrays and small images."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.config.model import ModelConfig
from dtrain.errors import ConfigError
from dtrain.models.task_shapes import padded_outputs
from dtrain.tasks import Task


class MLPLayer(nn.Module):
    """One hidden layer, [B, in_features] to [B, hidden_dim]: norm, Linear, GELU and dropout.

    Its input is added to its output if both have the same width. The first layer has no norm, because that would take
    away the scale of a sample's inputs.
    """

    def __init__(self, in_features: int, hidden_dim: int, dropout: float, *, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.norm = nn.Identity() if is_first else nn.LayerNorm(in_features)
        self.linear = nn.Linear(in_features, hidden_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(F.gelu(self.linear(self.norm(x))))
        return out if self.is_first else x + out


class MLP(nn.Module):
    """Predicts ``num_outputs`` numbers of a sample with ``in_features`` numbers in any shape.

    Args:
        in_features: numbers of one sample.
        num_outputs: classes, or target values.
        hidden_dim: width of the hidden layers.
        num_layers: number of hidden layers.
        dropout: probability after each hidden layer.
    """

    def __init__(self, in_features: int, num_outputs: int, hidden_dim: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.num_outputs = num_outputs
        widths = [in_features, *([hidden_dim] * num_layers)]
        self.blocks = nn.ModuleList(
            MLPLayer(width, hidden_dim, dropout, is_first=not index) for index, width in enumerate(widths[:-1])
        )
        self.norm = nn.LayerNorm(hidden_dim)
        self.head = nn.Linear(hidden_dim, padded_outputs(num_outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the prediction [B, num_outputs] for ``inputs`` [B, ...]."""
        x = inputs.flatten(1)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out[:, : self.num_outputs]


def build(config: ModelConfig, task: Task) -> MLP:
    """Builds the perceptron for the inputs and outputs of ``task``.

    Raises:
        ConfigError: the samples of the data have no numbers.
    """
    in_features = math.prod(task.input_shape)
    if not task.input_shape or not in_features:
        raise ConfigError(f"model=mlp takes samples of one number or more; those of the data have {task.input_shape}")
    return MLP(in_features, task.num_outputs, config.hidden_dim, config.num_layers, config.dropout)
