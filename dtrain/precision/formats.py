"""Floating-point formats as data: how many bits, and what follows from that, computed and never typed in.

Exact arithmetic of rational numbers, so that nothing here rounds but where a format does. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

EXACT, ROUNDED, SUBNORMAL, ZERO = "exact", "rounded", "subnormal", "flushed to zero"
INF, SATURATED, NAN = "overflow to Inf", "saturated", "NaN"

LEAST_GRADIENT = 2.0**-27
"""The magnitude below which the gradients of a network did not matter, and above which they did: Micikevicius et al.,
"Mixed Precision Training" (ICLR 2018), section 3.2."""


@dataclass(frozen=True)
class Rounded:
    """What a format makes of a number.

    Attributes:
        value: exact in double precision; Inf or NaN where that came of it.
        event: ``exact``, ``rounded``, ``subnormal`` (rounded, with fewer bits than the format has elsewhere), ``flushed
            to zero``, ``overflow to Inf``, ``saturated`` (the largest number instead) or ``NaN``.
    """

    value: float
    event: str


@dataclass(frozen=True)
class FloatFormat:
    """A sign bit, an exponent, a mantissa.

    Attributes:
        name: as configurations and tables have it.
        exponent_bits: biased by ``2^(exponent_bits - 1) - 1``; all zeros are zero and the subnormal numbers.
        mantissa_bits: after the leading one, which is not stored.
        ieee: the largest exponent is kept for Inf and NaN, and what is too large becomes Inf. Else that exponent has
            numbers too, only its all-ones mantissa is NaN, there is no Inf, and what is too large saturates, Inf
            included, as PyTorch 2.13 casts it.
        stored_bits: in memory, where that is more than the format has bits.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    ieee: bool = True
    stored_bits: int | None = None

    @property
    def bits(self) -> int:
        """With the sign."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Of the normal numbers."""
        return 2 - (1 << self.exponent_bits - 1)

    @property
    def max_exponent(self) -> int:
        """Of the largest number."""
        return (1 << self.exponent_bits - 1) - (1 if self.ieee else 0)

    @property
    def max(self) -> float:
        """The largest number."""
        ulps_below_next_power = 1 if self.ieee else 2  # where there is no Inf, the all-ones mantissa is NaN
        return math.ldexp(2 ** (self.mantissa_bits + 1) - ulps_below_next_power, self.max_exponent - self.mantissa_bits)

    @property
    def min_normal(self) -> float:
        """The least positive number with all its bits."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def min_subnormal(self) -> float:
        """The least positive number."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """From 1 to the next number."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def unit_roundoff(self) -> float:
        """The largest relative error of rounding in the normal range."""
        return self.epsilon / 2

    @property
    def decimal_digits(self) -> float:
        """The bits of the mantissa, the leading one included, as decimal digits."""
        return (self.mantissa_bits + 1) * math.log10(2)

    @property
    def num_finite(self) -> int:
        """How many numbers there are, zero counted once."""
        exponents = self.max_exponent - self.min_exponent + 2  # that of the subnormal numbers too
        nans = 0 if self.ieee else 1
        return 2 * ((exponents << self.mantissa_bits) - nans) - 1

    @property
    def binades(self) -> int:
        """Powers of two from the least subnormal to the largest number."""
        return self.max_exponent - self.min_exponent + self.mantissa_bits + 1

    @property
    def ones_add_up_to(self) -> int:
        """Where a sum of ones stops to grow, if each partial sum is rounded to this format."""
        return int(min(2.0 ** (self.mantissa_bits + 1), self.max))

    @property
    def needs_scaling(self) -> bool:
        """Whether gradients that matter (:data:`LEAST_GRADIENT`) may lie below its least number."""
        return self.min_subnormal > LEAST_GRADIENT

    def rounded(self, number: Fraction | float) -> Rounded:
        """``number`` to the nearest of this format's numbers, ties to even, subnormal numbers included."""
        if isinstance(number, float) and math.isnan(number):
            return Rounded(math.nan, NAN)
        if isinstance(number, float) and math.isinf(number):
            return self._too_large(number) if not self.ieee else Rounded(number, EXACT)
        exact = Fraction(number)
        if not exact:
            return Rounded(0.0, EXACT)
        exponent = max(_exponent(exact), self.min_exponent)
        ulp = Fraction(2) ** (exponent - self.mantissa_bits)
        nearest = round(exact / ulp) * ulp  # Python rounds fractions half to even
        if abs(nearest) > self.max:
            return self._too_large(exact)
        if nearest == exact:
            return Rounded(float(nearest), EXACT)
        if not nearest:
            return Rounded(0.0, ZERO)
        return Rounded(float(nearest), SUBNORMAL if abs(nearest) < self.min_normal else ROUNDED)

    def _too_large(self, number: Fraction | float) -> Rounded:
        sign = -1.0 if number < 0 else 1.0
        return Rounded(sign * math.inf, INF) if self.ieee else Rounded(sign * self.max, SATURATED)


FP32 = FloatFormat("fp32", 8, 23)
TF32 = FloatFormat("tf32", 8, 10, stored_bits=32)
BF16 = FloatFormat("bf16", 8, 7)
FP16 = FloatFormat("fp16", 5, 10)
FP8_E4M3 = FloatFormat("fp8 e4m3", 4, 3, ieee=False)
FP8_E5M2 = FloatFormat("fp8 e5m2", 5, 2)
FORMATS = (FP32, TF32, BF16, FP16, FP8_E4M3, FP8_E5M2)


def gamma(length: int, unit_roundoff: float) -> float:
    """The bound n u / (1 - n u) of ``length`` roundings in a row, in any order; Inf where n u reaches 1.

    Higham, "Accuracy and Stability of Numerical Algorithms" (2nd edition), lemma 3.1.
    """
    product = length * unit_roundoff
    return product / (1 - product) if product < 1 else math.inf


def product_bound(length: int, operands: FloatFormat, *, sums: FloatFormat = FP32, output: FloatFormat = FP32) -> float:
    """The largest error of a computed x.y, relative to |x|.|y|: both rounded to ``operands``, summed in ``sums``.

    For numbers in the formats' normal ranges. A format whose products are exact in ``sums`` still counts ``length``
    roundings, one more than its sums have.

    Args:
        length: of the vectors.
        operands: of the numbers multiplied.
        sums: in which they are multiplied and added, in any order.
        output: to which the sum is rounded in the end.
    """
    operand_error, output_error = operands.unit_roundoff, output.unit_roundoff if output != sums else 0.0
    return (1 + operand_error) ** 2 * (1 + gamma(length, sums.unit_roundoff)) * (1 + output_error) - 1


def _exponent(number: Fraction) -> int:
    """The exponent of the largest power of two that is at most ``abs(number)``, which is not 0."""
    numerator, denominator = abs(number.numerator), number.denominator
    exponent = numerator.bit_length() - denominator.bit_length()
    return exponent if Fraction(numerator, denominator) >= Fraction(2) ** exponent else exponent - 1
