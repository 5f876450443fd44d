"""Records of ``Engine.measure_precision``: losses of one step to precision.

Histograms hold gradients as they leave backward, times the loss scale, over all micro-batches of all ranks. Shares are
between 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from dtrain.precision.formats import FP8_E4M3, FP8_E5M2, FP16, FloatFormat
from dtrain.precision.histogram import Histogram, share
from dtrain.precision.rounding import Loss


@dataclass(frozen=True)
class GradientShares:
    """Shares of a gradient, at the present loss scale, that formats would lose.

    If the gradient was computed in FP16, the elements that FP16 flushes are zeros already: then ``flushed_fp16`` is
    0, and ``zeros`` and ``subnormal_fp16`` tell what happened.

    Attributes:
        zeros: share of zeros among all elements.
        flushed_fp16: share of the nonzero elements that FP16 flushes to zero.
        recovered_fp16: share of the nonzero elements that FP16 flushes now and keeps at the better scale.
        subnormal_fp16: share of the nonzero elements below FP16's normal range: rounded to fewer bits, or flushed.
        overflow_fp16: share of all elements that overflow FP16, or are not finite already.
        flushed_e4m3: share of the nonzero elements that FP8 E4M3 flushes at the tensor's own scale.
        flushed_e5m2: the same of E5M2.
        saturated_e4m3: share of all elements that E4M3 saturates without a scale of its own.
        saturated_e5m2: the same of E5M2.
    """

    zeros: float
    flushed_fp16: float
    recovered_fp16: float
    subnormal_fp16: float
    overflow_fp16: float
    flushed_e4m3: float
    flushed_e5m2: float
    saturated_e4m3: float
    saturated_e5m2: float

    @staticmethod
    def of(histogram: Histogram, largest: float, better: float) -> GradientShares:
        """Returns the shares of a scaled gradient.

        Args:
            histogram: of its elements.
            largest: largest magnitude, which decides the scale of an FP8 tensor.
            better: the better loss scale divided by the present one.
        """

        def of_nonzero(count: int) -> float:
            return share(count, histogram.num_nonzero)

        def of_all(floats: FloatFormat) -> float:
            return share(histogram.overflowing(floats) + histogram.num_nonfinite, histogram.total)

        flushed = histogram.flushed(FP16)
        return GradientShares(
            zeros=share(histogram.zeros, histogram.total),
            flushed_fp16=of_nonzero(flushed),
            recovered_fp16=of_nonzero(max(flushed - histogram.flushed(FP16, power_below(better)), 0)),
            subnormal_fp16=of_nonzero(histogram.subnormal(FP16)),
            overflow_fp16=of_all(FP16),
            flushed_e4m3=of_nonzero(histogram.flushed(FP8_E4M3, own_scale(largest, FP8_E4M3))),
            flushed_e5m2=of_nonzero(histogram.flushed(FP8_E5M2, own_scale(largest, FP8_E5M2))),
            saturated_e4m3=of_all(FP8_E4M3),
            saturated_e5m2=of_all(FP8_E5M2),
        )


@dataclass(frozen=True)
class UpdateShares:
    """The update of one parameter's FP32 master, and what training without a master would have lost of it.

    Attributes:
        num_changed: elements of the master that the update changed.
        ratio: norm of the update divided by the norm of the weights before it; None if they are all 0.
        lost_bf16: share of the changed elements whose update vanishes if the weight is stored in BF16: ``round(w + u)
            == w``, with w the old weight in BF16 and u the FP32 update.
        lost_fp16: the same of FP16.
    """

    num_changed: int
    ratio: float | None
    lost_bf16: float
    lost_fp16: float


@dataclass(frozen=True)
class ParameterPrecision:
    """One parameter in the step.

    Attributes:
        name: name of the parameter.
        numel: elements of the parameter; the histogram has as many for each micro-batch of each rank.
        format: format in which the gradient was computed: ``fp32``, ``bf16`` or ``fp16``.
        largest: largest magnitude of the gradient, without the loss scale; None if it is not finite.
        gradient: histogram of the gradient times the loss scale.
        shares: what formats would do to it.
        update: None if the step was skipped.
    """

    name: str
    numel: int
    format: str
    largest: float | None
    gradient: Histogram
    shares: GradientShares
    update: UpdateShares | None


@dataclass(frozen=True)
class OperandPrecision:
    """One operand of an FP8 product, quantized as the product does it.

    Attributes:
        operand: ``input``, ``weight`` or ``gradient`` (of the output).
        format: ``e4m3`` or ``e5m2``.
        sqnr_db: signal-to-quantization-noise ratio in decibels; None without any error, or with an Inf.
        underflow: share of the elements that became zero and were not.
        saturated: share of the elements beyond the largest number.
    """

    operand: str
    format: str
    sqnr_db: float | None
    underflow: float
    saturated: float

    @staticmethod
    def of(operand: str, format: str, loss: Loss) -> OperandPrecision:
        """Returns the record of ``loss``, summed over the step."""
        sqnr = loss.sqnr_db
        shares = share(loss.underflows, loss.numel), share(loss.saturated, loss.numel)
        return OperandPrecision(operand, format, sqnr if math.isfinite(sqnr) else None, *shares)


@dataclass(frozen=True)
class Float8ProductPrecision:
    """One of the three products of an FP8 Linear.

    Attributes:
        module: name of the module.
        product: ``fprop`` (output), ``dgrad`` (gradient of the input) or ``wgrad`` (gradient of the weight).
        sqnr_db: of both operands together, as their noises add up; None without any error, or with an Inf.
        operands: left and right; the weight is missing if it is frozen.
    """

    module: str
    product: str
    sqnr_db: float | None
    operands: tuple[OperandPrecision, ...]

    @staticmethod
    def of(module: str, product: str, operands: tuple[OperandPrecision, ...]) -> Float8ProductPrecision:
        """Returns the record of a product of ``operands``."""
        noise = sum(10 ** (-operand.sqnr_db / 10) for operand in operands if operand.sqnr_db is not None)
        return Float8ProductPrecision(module, product, -10 * math.log10(noise) if noise else None, operands)


@dataclass(frozen=True)
class ActivationPrecision:
    """The output of one module, and its gradient.

    Attributes:
        module: name of the module.
        output: histogram of the output's elements.
        gradient: histogram of those of its gradient, times the loss scale.
        shares: what formats would do to the gradient.
    """

    module: str
    output: Histogram
    gradient: Histogram
    shares: GradientShares


@dataclass(frozen=True)
class PrecisionReport:
    """Losses of one step to its formats, and those that other formats would cause.

    Attributes:
        step: number of the step, from 1.
        applied: whether the step was applied.
        loss_scale: loss scale of the step.
        better_scale: largest power of two that keeps the step's largest gradient, times the margin of a calibrated loss
            scale, in FP16; None if no gradient is finite and above 0.
        parameters: the trained parameters, in the order of backward.
        float8: the products of the FP8 modules.
        activations: the modules that were asked for.
    """

    step: int
    applied: bool
    loss_scale: float
    better_scale: float | None
    parameters: tuple[ParameterPrecision, ...]
    float8: tuple[Float8ProductPrecision, ...] = ()
    activations: tuple[ActivationPrecision, ...] = ()

    def worst(self, count: int = 10) -> tuple[ParameterPrecision, ...]:
        """Returns the parameters that lose most in FP16 at the present scale: flushed, then subnormal, then in FP8."""

        def loss(parameter: ParameterPrecision) -> tuple[float, ...]:
            shares = parameter.shares
            return shares.flushed_fp16, shares.subnormal_fp16, shares.flushed_e4m3, shares.flushed_e5m2

        return tuple(sorted(self.parameters, key=loss, reverse=True)[:count])

    def unscaled(self) -> dict[str, Histogram]:
        """Returns the histogram of each parameter's gradient without the loss scale.

        A scale that is no power of two counts as the nearest one.
        """
        scale = 2.0 ** -round(math.log2(self.loss_scale))
        return {parameter.name: parameter.gradient.scaled(scale) for parameter in self.parameters}

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {
            "step": self.step,
            "applied": self.applied,
            "loss_scale": self.loss_scale,
            "better_scale": self.better_scale,
            "parameters": {
                own.name: {
                    "numel": own.numel,
                    "format": own.format,
                    "largest": own.largest,
                    "shares": asdict(own.shares),
                    "update": None if own.update is None else asdict(own.update),
                    "gradient": own.gradient.to_dict(),
                }
                for own in self.parameters
            },
            "float8": [asdict(own) for own in self.float8],
            "activations": {
                own.module: {
                    "shares": asdict(own.shares),
                    "output": own.output.to_dict(),
                    "gradient": own.gradient.to_dict(),
                }
                for own in self.activations
            },
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> PrecisionReport:
        """Returns the report that ``to_dict`` describes."""
        return PrecisionReport(
            **{key: values[key] for key in ("step", "applied", "loss_scale", "better_scale")},
            parameters=tuple(_parameter(name, own) for name, own in values["parameters"].items()),
            float8=tuple(
                Float8ProductPrecision(
                    own["module"],
                    own["product"],
                    own["sqnr_db"],
                    tuple(OperandPrecision(**operand) for operand in own["operands"]),
                )
                for own in values["float8"]
            ),
            activations=tuple(
                ActivationPrecision(
                    name,
                    Histogram.from_dict(own["output"]),
                    Histogram.from_dict(own["gradient"]),
                    GradientShares(**own["shares"]),
                )
                for name, own in values["activations"].items()
            ),
        )


class PrecisionMeasurement(Protocol):
    """The measurement of one step, from ``Engine.measure_precision``."""

    def report(self) -> PrecisionReport | None:
        """Returns what the step has lost, None if none was taken; after the context, and all ranks call.

        On a GPU this waits for the step.
        """


def _parameter(name: str, values: Mapping[str, Any]) -> ParameterPrecision:
    return ParameterPrecision(
        name,
        values["numel"],
        values["format"],
        values["largest"],
        Histogram.from_dict(values["gradient"]),
        GradientShares(**values["shares"]),
        None if values["update"] is None else UpdateShares(**values["update"]),
    )


def own_scale(largest: float, floats: FloatFormat) -> float:
    """Returns the power of two by which an FP8 tensor of magnitudes up to ``largest`` is multiplied before its cast.

    It is the reciprocal of ``dtrain.precision.float8.cast.scale_of``, and 1 if ``largest`` is not finite.
    """
    if not largest or not math.isfinite(largest):
        return 1.0
    mantissa, exponent = math.frexp(largest)
    limit, room = math.frexp(floats.max)
    return math.ldexp(1.0, min(max(room - exponent - (mantissa > limit), -126), 126))


def power_below(number: float) -> float:
    """Returns the largest power of two up to ``number``, which is above 0."""
    return math.ldexp(1.0, math.frexp(number)[1] - 1)
