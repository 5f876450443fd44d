"""The interface of a task.

A batch is a dictionary of CPU tensors with the samples along dimension 0. ``targets`` is what the model should answer,
all others are its inputs, in the order of the dictionary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dtrain.errors import ModelError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dtrain.engine.interface import Engine

IGNORE_INDEX = -100
"""A target that does not count in the loss."""

Validation = Iterator[tuple[dict[str, Tensor], bool]]
"""Micro-batches of this rank, the same number on each rank, and whether each one counts."""


def num_targets(targets: Tensor) -> int:
    """Returns how many of ``targets``, in host memory, count in the loss.

    Targets that are classes or tokens count one by one, except ``IGNORE_INDEX``; numbers count by sample.
    """
    if targets.is_floating_point():
        return len(targets)
    return int((targets != IGNORE_INDEX).sum())


class TaskOutput(NamedTuple):
    """Output of a model under a task.

    Attributes:
        prediction: FP32, what the user's model returned.
        loss: FP32 mean over the targets that count (0 if there are none), or None without targets.
    """

    prediction: Tensor
    loss: Tensor | None


@dataclass(frozen=True)
class Sample:
    """Result shown at the end of a run: text for the console and, unless it is text alone, a picture."""

    text: str
    figure: Figure | None = None


@dataclass(frozen=True)
class SampleOptions:
    """Size of a sample.

    Attributes:
        num_tokens: tokens of a text.
        max_seq_len: tokens that the model sees.
        seed: of the draws.
    """

    num_tokens: int
    max_seq_len: int
    seed: int


class Task(ABC):
    """Goal of a training: loss, metrics and sample.

    A data set has a task. The model learns it through ``loss``; validation reports the metrics that
    ``metrics`` computes from sums over all samples, so that they do not depend on the number of ranks.

    Attributes:
        name: ``language``, ``classification``, ``regression`` or ``denoising``.
        needs_for_sample: what ``sample`` needs of the model, for messages.
        unit: what counts in the loss: ``tokens`` or ``samples``.
        num_outputs: outputs of the model for one sample: tokens of the vocabulary, classes or target values; of a
            denoising model the classes it is told.
        input_shape: shape of the first input of one sample; empty for tokens.
        input_mean: subtracted from the first input, a number for each index of its first dimension (channel or column);
            empty if the input is not standardized.
        input_std: by which the difference is divided.
        is_image: whether the first input is an image, whose pixels are in [0, 1] before that.
    """

    name: ClassVar[str]
    needs_for_sample: ClassVar[str] = "a model(inputs) of this task"
    unit: ClassVar[str] = "samples"
    num_outputs: int
    input_shape: tuple[int, ...]
    input_mean: tuple[float, ...] = ()
    input_std: tuple[float, ...] = ()
    is_image: bool = False

    @abstractmethod
    def loss(self, prediction: Tensor, targets: Tensor) -> Tensor:
        """Returns the 0-dim FP32 mean loss of an FP32 ``prediction`` over the targets that count.

        Raises:
            ModelError: the prediction has another shape than the targets need.
        """

    def sums(self, output: Any, targets: Tensor) -> Tensor:
        """Returns the FP64 sums [n] over the samples of a micro-batch from which ``metrics`` are computed."""
        return targets.new_empty(0).double()

    def metrics(self, sums: Sequence[float], count: float) -> Mapping[str, float]:
        """Returns metrics by name.

        Args:
            sums: ``sums``, added over the validation samples.
            count: targets that count.
        """
        return {}

    def describe(self, batch: dict[str, Tensor]) -> list[str]:
        """Returns one line about each sample of a batch, for the record of a replayed step."""
        return []

    def in_data_units(self, prediction: Tensor) -> Tensor:
        """Returns a prediction in the unit of the data's targets; scores of classes and noise have none."""
        return prediction

    @abstractmethod
    def sample(self, engine: Engine, validation: Validation, options: SampleOptions) -> Sample:
        """Returns what the trained model does, the same on all ranks, which all call.

        Args:
            engine: the trained one.
            validation: the batches of ``metrics`` again.
            options: size of the sample.
        """


def require_shape(prediction: Tensor, expected: Sequence[int], what: str) -> None:
    """Checks the shape of a model's output.

    Raises:
        ModelError: it differs from ``expected``, of which ``what`` gives the meaning.
    """
    if tuple(prediction.shape) != tuple(expected):
        raise ModelError(
            f"the model returned a prediction of shape {tuple(prediction.shape)}; expected {tuple(expected)}, {what}"
        )


def in_sample_order(gathered: Tensor, num_micro_batches: int) -> Tensor:
    """Returns the rows of all micro-batches in the order of the samples, [ranks * num_micro_batches, n].

    Args:
        gathered: [ranks, num_micro_batches * n]; micro-batch i of rank r has index i * ranks + r.
        num_micro_batches: of each rank.
    """
    return gathered.view(len(gathered), num_micro_batches, -1).transpose(0, 1).flatten(0, 1)


def gather_samples(
    engine: Engine, validation: Validation, columns: Callable[[TaskOutput, dict[str, Tensor]], Tensor]
) -> Tensor:
    """Returns ``columns`` of every validation sample that counts, in the order of the samples; all ranks call.

    Args:
        engine: is put into evaluation mode.
        validation: this rank's micro-batches.
        columns: maps the output and a micro-batch on the device to FP64 values [B, n].

    Returns:
        FP64 [samples, n], in host memory.
    """
    rows: list[Tensor] = []
    with engine.eval():
        for micro, counts in validation:
            batch = {name: tensor.to(engine.device) for name, tensor in micro.items()}
            found = columns(engine(**batch), batch).double()
            rows.append(found if counts else found[:0])
    # ranks hold different numbers of samples, so each row has its length in front and is padded
    longest, width = max(len(row) for row in rows), rows[0].shape[1]
    longest = int(engine.comm.gather_rows(rows[0].new_tensor([longest]), label="longest batch").max())
    padded = rows[0].new_zeros(len(rows), 1 + longest * width)
    for row, values in zip(padded, rows, strict=True):
        row[0] = len(values)
        row[1 : 1 + values.numel()] = values.flatten()
    ordered = in_sample_order(engine.comm.gather_rows(padded.flatten(), label="validation samples").cpu(), len(rows))
    return torch.cat([row[1 : 1 + int(row[0]) * width].view(-1, width) for row in ordered])
