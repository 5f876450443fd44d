"""Records of the probe: products, flips, trials and advice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from dtrain.precision.histogram import Histogram

Item = TypeVar("Item")

FORWARD = ("fprop", "forward")
"""Products of a forward; the others are of gradients."""


@dataclass(frozen=True)
class ProductResult:
    """One product of one module in one format, from one FP32 forward and backward.

    module is the path of the module, '' for the model itself. product is 'fprop', 'dgrad' or
    'wgrad', or 'forward' for a module that computes without being a product. cause is 'range',
    'precision', or '' where no loss is worth naming. predicted is the predicted change of the
    loss (root mean square over the micro-batches).
    """

    module: str
    product: str
    format: str
    sqnr_db: float
    underflow: float
    saturation: float
    cause: str
    predicted: float

    @property
    def size(self) -> float:
        """Returns the predicted change, infinite if it is no number."""
        return math.inf if math.isnan(self.predicted) else self.predicted


@dataclass(frozen=True)
class Analysis:
    """Results of each module alone in each format, without training in it.

    Attributes:
        products: one result per module, product and format. Modules that no format changes are left out.
        gradients: histogram of each parameter's unscaled FP32 gradient, over all micro-batches.
        activation_gradients: histogram of the unscaled FP32 gradients of each product's output.
        loss_scale: constant scale at which FP16's dgrad and wgrad were examined: the largest power of two with scale x
            largest gradient x 8 at most 65,504. None if FP16 was not examined or no gradient was found.
        unscaled: FP16's dgrad and wgrad at scale 1, for the modules whose figures differ from those in ``products``.
        unexamined: why a module could not be examined, by module.
        blocks_float8: why a Linear stays in BF16 under ``precision=fp8``, by module; empty unless FP8 was examined.
        children: names of the modules inside each examined module that are examined too.
        kinds: class name of each examined module.
    """

    products: tuple[ProductResult, ...]
    gradients: Mapping[str, Histogram] = field(default_factory=dict)
    activation_gradients: Mapping[str, Histogram] = field(default_factory=dict)
    loss_scale: float | None = None
    unscaled: tuple[ProductResult, ...] = ()
    unexamined: Mapping[str, str] = field(default_factory=dict)
    blocks_float8: Mapping[str, str] = field(default_factory=dict)
    children: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)

    def worst(self, format_name: str) -> list[ProductResult]:
        """Returns the products of a format, those with the largest predicted change of the loss first."""
        found = [result for result in self.products if result.format == format_name]
        return sorted(found, key=lambda result: result.size, reverse=True)


@dataclass(frozen=True)
class Flip:
    """The change of the loss with one module alone in the format: predicted and measured."""

    module: str
    format: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class AdvisedRule:
    """One line of precision.rules, and why it is advised."""

    pattern: str
    format: str
    reason: str


@dataclass(frozen=True)
class Trial:
    """One short training in one format, beside FP32's.

    ms_per_step is None where the format is emulated: its time says nothing. cosine is that of the
    first gradients with FP32's; gap is the final loss less FP32's; failure says why a training
    ended early.
    """

    format: str
    rules: dict[str, str]
    losses: list[float]
    ms_per_step: float | None
    memory: int
    cosine: float
    skipped: int
    loss_scale: float
    gap: float
    failure: str | None

    @property
    def final_loss(self) -> float:
        """Returns the number that formats are compared by; see ``final_loss``."""
        return final_loss(self.losses)


def last_quarter(steps: Sequence[Item]) -> Sequence[Item]:
    """Returns the part of a trial's steps that is compared."""
    return steps[-max(1, len(steps) // 4) :]


def final_loss(losses: Sequence[float]) -> float:
    """Returns the mean loss over the last quarter."""
    return math.fsum(last_quarter(losses)) / len(last_quarter(losses))


@dataclass(frozen=True)
class Advice:
    """The recommended precision, its rules, and one line to paste.

    loss_scale is a constant scale where one is advised (FP16), else None. untested lists what no
    part of the probe has tried.
    """

    precision: str
    rules: tuple[AdvisedRule, ...]
    loss_scale: float | None
    line: str
    reasons: tuple[str, ...]
    untested: tuple[str, ...]
