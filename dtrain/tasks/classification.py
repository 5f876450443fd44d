"""Classification: one class of several, with accuracy and a confusion matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.tasks.task import IGNORE_INDEX, Sample, SampleOptions, Task, Validation, gather_samples, require_shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtrain.engine.interface import Engine

_MOST_NAMED = 70
"""Classes of a confusion matrix whose names are on its axes."""


@dataclass(frozen=True)
class Classification(Task):
    """Cross entropy over classes; ``targets`` are int64 [B], ``IGNORE_INDEX`` for a sample without a class.

    Attributes:
        labels: names of the classes.
        input_shape: shape of one input.
        label_smoothing: share of the target that is spread over all classes.
        input_mean: see ``dtrain.tasks.task.Task``.
        input_std: the same.
        is_image: the same.
    """

    name = "classification"
    labels: tuple[str, ...]
    input_shape: tuple[int, ...]
    label_smoothing: float = 0.0
    input_mean: tuple[float, ...] = ()
    input_std: tuple[float, ...] = ()
    is_image: bool = False

    @property
    def num_outputs(self) -> int:  # type: ignore[override]
        return len(self.labels)

    def loss(self, prediction: Tensor, targets: Tensor) -> Tensor:
        what = "a number for each sample and class of the data"
        require_shape(prediction, (len(targets), self.num_outputs), what)
        counted = (targets != IGNORE_INDEX).sum().clamp(min=1)
        # not reduction="mean", which is NaN if all targets are ignored
        return F.cross_entropy(prediction, targets, reduction="sum", label_smoothing=self.label_smoothing) / counted

    def sums(self, output: Any, targets: Tensor) -> Tensor:
        prediction: Tensor = output.prediction
        return (prediction.argmax(dim=1) == targets).sum().double().reshape(1)

    def metrics(self, sums: Sequence[float], count: float) -> Mapping[str, float]:
        return {"accuracy": sums[0] / count}

    def describe(self, batch: dict[str, Tensor]) -> list[str]:
        names = {IGNORE_INDEX: ""} | dict(enumerate(self.labels))
        return [names[target] for target in batch["targets"].tolist()]

    def sample(self, engine: Engine, validation: Validation, options: SampleOptions) -> Sample:
        """Returns the confusion matrix of the validation samples, and the classes that are confused most."""
        pairs = gather_samples(
            engine,
            validation,
            lambda output, batch: torch.stack((batch["targets"], output.prediction.argmax(dim=1)), dim=1),
        ).long()
        pairs = pairs[pairs[:, 0] != IGNORE_INDEX]
        num = self.num_outputs
        matrix = torch.bincount(pairs[:, 0] * num + pairs[:, 1], minlength=num * num).view(num, num)
        return Sample(self._text(matrix), self._draw(matrix))

    def _text(self, matrix: Tensor) -> str:
        total, correct = int(matrix.sum()), int(matrix.diagonal().sum())
        lines = [f"{correct} of {total} validation samples right ({100 * correct / total:.1f} %)"]
        wrong = matrix - torch.diag(matrix.diagonal())
        for index in wrong.flatten().argsort(descending=True, stable=True)[:5].tolist():
            row, column = divmod(index, self.num_outputs)
            if count := int(wrong[row, column]):
                lines.append(f"{self.labels[row]} taken for {self.labels[column]}: {count} of {int(matrix[row].sum())}")
        return "\n".join(lines)

    def _draw(self, matrix: Tensor) -> Figure:
        from matplotlib.figure import Figure  # it takes half a second to import

        figure = Figure(figsize=(8, 7), dpi=110, layout="constrained")
        axes: Axes = figure.subplots()
        shares = matrix / matrix.sum(dim=1, keepdim=True).clamp(min=1)
        image = axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
        figure.colorbar(image, ax=axes, label="share of the samples of a class", shrink=0.8)
        axes.set(xlabel="predicted class", ylabel="class")
        if self.num_outputs <= _MOST_NAMED:
            size = 10 if self.num_outputs <= 20 else 6
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_ticks(range(self.num_outputs), list(self.labels), fontsize=size, parse_math=False)
            axes.tick_params(axis="x", rotation=90 if max(map(len, self.labels)) > 3 else 0)
        axes.set_title(self._text(matrix).partition("\n")[0])
        return figure
