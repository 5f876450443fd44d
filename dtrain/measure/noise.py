"""The noise of FP32: how far a training's loss moves though its formats stay. Gaps are told in units of it.

It has two parts, each a standard deviation over trainings: of weights that start an ulp away, and of other seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

import torch
from torch import nn

DETECTION_LIMIT = 2.0
"""A smaller gap, in units of noise, cannot be told from noise."""


@dataclass(frozen=True)
class Noise:
    """The standard deviation of an FP32 run's loss, from rounding and from the seed."""

    rounding: float
    seed: float

    @classmethod
    def of(cls, reference: float, perturbed: Sequence[float], seeds: Sequence[float]) -> Noise:
        """Returns the noise of losses: ``reference`` with those of ``perturb_by_an_ulp``, and of other seeds."""
        return cls(stdev([reference, *perturbed]), stdev([reference, *seeds]))

    @property
    def unit(self) -> float:
        """Returns both noises together, the unit in which gaps are told."""
        return math.hypot(self.rounding, self.seed)


def perturb_by_an_ulp(model: nn.Module, seed: int) -> None:
    """Moves every trained weight of ``model`` on the CPU to a neighboring number of its dtype, up or down at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                sides = torch.randint(2, parameter.shape, generator=generator, dtype=torch.int8)
                limit = torch.where(sides.bool(), torch.inf, -torch.inf).to(parameter)
                parameter.copy_(torch.nextafter(parameter, limit))
