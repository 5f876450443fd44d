"""What the probe measures and says: products, flips, trials, noise and advice."""

import math
from dataclasses import dataclass


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


@dataclass(frozen=True)
class Flip:
    """The change of the loss with one module alone in the format: predicted and measured."""

    module: str
    format: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class Rule:
    """One line of precision.rules, and why it is advised."""

    pattern: str
    format: str
    reason: str


@dataclass(frozen=True)
class Noise:
    """The standard deviation of an FP32 run's final loss, from rounding and from the seed."""

    rounding: float
    seed: float

    @property
    def unit(self) -> float:
        """Returns both noises together, the unit in which gaps are told."""
        return math.hypot(self.rounding, self.seed)

    @property
    def detection_limit(self) -> float:
        """Returns the gap below which a difference cannot be told from noise."""
        return 2 * self.unit


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


@dataclass(frozen=True)
class Advice:
    """The recommended precision, its rules, and one line to paste.

    loss_scale is a constant scale where one is advised (FP16), else None. untested lists what no
    part of the probe has tried.
    """

    precision: str
    rules: tuple[Rule, ...]
    loss_scale: float | None
    line: str
    reasons: tuple[str, ...]
    untested: tuple[str, ...]
