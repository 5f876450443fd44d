"""Counts the magnitudes of modules' outputs and of the gradients of these."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from dtrain.distributed.communicator import Communicator
from dtrain.engine.measurement.hooks import on_outputs
from dtrain.engine.measurement.totals import max_over_ranks, sum_over_ranks
from dtrain.parameters.magnitudes import MagnitudeCounts
from dtrain.precision.histogram import Histogram
from dtrain.precision.report import ActivationPrecision, GradientShares


class ActivationMeasurement:
    """Histograms of the outputs of ``modules``, given by name, and of their gradients, over one step."""

    def __init__(self, modules: Mapping[str, nn.Module], device: torch.device) -> None:
        self._modules = modules
        self._numbers = {name: number for number, name in enumerate(modules)}
        self._outputs = MagnitudeCounts(len(modules), device)
        self._gradients = MagnitudeCounts(len(modules), device)

    def hooks(self) -> AbstractContextManager[object]:
        return on_outputs(self._modules, partial(self._add, self._gradients), partial(self._add, self._outputs))

    def _add(self, magnitudes: MagnitudeCounts, name: str, values: Tensor) -> None:
        if values.numel():
            magnitudes.add(self._numbers[name], values)

    def totals(self, comm: Communicator, better: float) -> tuple[ActivationPrecision, ...]:
        """Returns the records; all ranks call. ``better``: see ``GradientShares.of``."""
        if not self._modules:
            return ()
        outputs = sum_over_ranks(comm, self._outputs.counts, label="counts of outputs").tolist()
        gradients = sum_over_ranks(comm, self._gradients.counts, label="counts of output gradients").tolist()
        largest = max_over_ranks(comm, self._gradients.largest, label="largest output gradients").tolist()
        return tuple(
            ActivationPrecision(
                name,
                Histogram(tuple(outputs[number])),
                histogram := Histogram(tuple(gradients[number])),
                GradientShares.of(histogram, largest[number], better),
            )
            for number, name in enumerate(self._modules)
        )
