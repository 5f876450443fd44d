"""The number that formats are compared by, and its noise in FP32.

The number is the mean loss over the last quarter of a trial's steps. Its noise is the standard deviation over FP32
trainings: one whose weights start an ulp away (rounding), and some with other seeds. Another seed has other weights,
another dropout, and other samples up to the last quarter. There the samples are the same as in every other training:
the loss of other samples would be the noise of the data, not of the training.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dtrain.config.schema import RunConfig
from dtrain.data import BatchLoader, Dataset
from dtrain.errors import ConfigError
from dtrain.measure.probe.records import Noise

MicroBatches = list[dict[str, Tensor]]
Item = TypeVar("Item")


def last_quarter(steps: Sequence[Item]) -> Sequence[Item]:
    """Returns the part of a trial's steps that is compared."""
    return steps[-max(1, len(steps) // 4) :]


def final_loss(losses: Sequence[float]) -> float:
    """Returns the mean loss over the last quarter."""
    return math.fsum(last_quarter(losses)) / len(last_quarter(losses))


def noise_of(reference: float, perturbed: Sequence[float], seeds: Sequence[float]) -> Noise:
    """Returns the standard deviations of final losses: ``reference`` with ``perturbed``, and with ``seeds``."""
    return Noise(statistics.stdev([reference, *perturbed]), statistics.stdev([reference, *seeds]))


def perturb_by_an_ulp(model: nn.Module, seed: int) -> None:
    """Moves every trained weight of ``model`` on the CPU to a neighboring number of its dtype, up or down at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                sides = torch.randint(2, parameter.shape, generator=generator, dtype=torch.int8).to(parameter.device)
                limit = torch.where(sides.bool(), torch.inf, -torch.inf).to(parameter.dtype)
                parameter.copy_(torch.nextafter(parameter, limit))


def load_steps(config: RunConfig, dataset: Dataset) -> list[MicroBatches]:
    """Returns the micro-batches of every step, in host memory.

    Raises:
        ConfigError: the data has no sample.
    """
    if not dataset.train.num_samples:
        raise ConfigError("the training data has no sample")
    train = config.train
    num_micro_batches = train.global_batch_size // train.micro_batch_size
    loader = BatchLoader(dataset.train, config.seed, train.micro_batch_size, num_micro_batches)
    return list(islice(loader, train.steps))


def with_last_quarter_of(steps: Sequence[MicroBatches], other: Sequence[MicroBatches]) -> list[MicroBatches]:
    """Returns ``steps`` with the last quarter replaced by that of ``other``."""
    measured = last_quarter(other)
    return [*steps[: -len(measured)], *measured]


def cosine(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Returns the cosine of two gradients, each of all tensors by name; NaN if one is zero or not finite."""
    dot = squares = reference_squares = 0.0
    for name, expected in reference.items():
        ours: Any = gradients[name].to(expected.device).double().flatten()
        theirs: Any = expected.double().flatten()
        dot += float(ours @ theirs)
        squares += float(ours @ ours)
        reference_squares += float(theirs @ theirs)
    norms = math.sqrt(squares) * math.sqrt(reference_squares)
    return dot / norms if norms and math.isfinite(norms) else math.nan
