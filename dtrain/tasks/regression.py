"""Regression: numbers, with the root mean squared error in the targets' own unit and a picture of the fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.tasks.task import Sample, SampleOptions, Task, Validation, gather_samples, require_shape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dtrain.engine.interface import Engine

_ROUNDING = 1e-12
"""Share of a sum of squares that FP64 may lose: a smaller spread of the targets is none."""


@dataclass(frozen=True)
class Regression(Task):
    """Mean squared error; ``targets`` are FP32 [B, D].

    Attributes:
        input_shape: shape of one input.
        mean: of each target value; the model learns (target - mean) / std.
        std: of each target value.
        input_mean: see ``dtrain.tasks.task.Task``.
        input_std: the same.
    """

    name = "regression"
    input_shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    input_mean: tuple[float, ...] = ()
    input_std: tuple[float, ...] = ()

    @property
    def num_outputs(self) -> int:  # type: ignore[override]
        return len(self.mean)

    def loss(self, prediction: Tensor, targets: Tensor) -> Tensor:
        require_shape(prediction, targets.shape, "a number for each sample and target value of the data")
        return F.mse_loss(prediction, targets)

    def sums(self, output: Any, targets: Tensor) -> Tensor:
        """Returns for each target value the squared errors, the values and their squares, as the model learns them."""
        errors = output.prediction.double() - targets.double()
        values = targets.double()  # about the mean: smaller numbers lose less
        return torch.cat((errors.square().sum(0), values.sum(0), values.square().sum(0)))

    def metrics(self, sums: Sequence[float], count: float) -> Mapping[str, float]:
        size = self.num_outputs
        errors, values, squares = (sums[start : start + size] for start in range(0, 3 * size, size))
        unit = max(self.std)  # apart from the ratios, whose squares neither overflow nor all vanish
        shares = [(std / unit) ** 2 for std in self.std]
        error, square, constant = (
            sum(share * value for share, value in zip(shares, column, strict=True))
            for column in (errors, squares, [value * value / count for value in values])
        )
        found = {"rmse": math.sqrt(error / count / size) * unit}
        if square - constant > _ROUNDING * square:
            found["r2"] = 1 - error / (square - constant)
        return found

    def describe(self, batch: dict[str, Tensor]) -> list[str]:
        values = self.in_data_units(batch["targets"])
        return [", ".join(f"{value:.5g}" for value in row) for row in values.tolist()]

    def in_data_units(self, prediction: Tensor) -> Tensor:
        """Returns targets FP64 [B, D] in the unit of the data; FP32 would have few digits beside a large mean."""
        std, mean = (torch.tensor(values, dtype=torch.float64) for values in (self.std, self.mean))
        return prediction.double() * std.to(prediction.device) + mean.to(prediction.device)

    def sample(self, engine: Engine, validation: Validation, options: SampleOptions) -> Sample:
        """Returns predicted against true values of the validation samples."""
        size = self.num_outputs
        rows = gather_samples(
            engine, validation, lambda output, batch: torch.cat((batch["targets"], output.prediction), dim=1)
        )
        true, predicted = self.in_data_units(rows[:, :size]), self.in_data_units(rows[:, size:])
        errors = (predicted - true).abs()
        text = f"half of {len(rows)} validation samples are off by less than {float(errors.median()):.4g}"
        return Sample(text, _draw(true, predicted, text))


def _draw(true: Tensor, predicted: Tensor, title: str) -> Figure:
    from matplotlib.figure import Figure  # it takes half a second to import

    figure = Figure(figsize=(6.5, 6), dpi=110, layout="constrained")
    axes = figure.subplots()
    for column in range(min(10, true.shape[1])):
        label = f"target {column}" if true.shape[1] > 1 else None
        axes.plot(true[:, column], predicted[:, column], ".", markersize=4, alpha=0.5, label=label)
    low, high = float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))
    axes.plot([low, high], [low, high], color="black", linewidth=1)
    axes.set(xlabel="true value", ylabel="predicted value", title=title, aspect="equal")
    axes.grid(alpha=0.3)
    if true.shape[1] > 1:
        axes.legend()
    return figure
