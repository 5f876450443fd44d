"""Floating-point formats as data: every property is computed from the numbers of bits.

Arithmetic is exact, on rational numbers, so that only the format under study rounds. Does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

EXACT, ROUNDED, SUBNORMAL, ZERO = "exact", "rounded", "subnormal", "flushed to zero"
INF, SATURATED, NAN = "overflow to Inf", "saturated", "NaN"

LEAST_GRADIENT = 2.0**-27
"""Smallest gradient magnitude that mattered to training in Micikevicius et al., "Mixed Precision Training" (ICLR 2018),
section 3.2."""


@dataclass(frozen=True)
class Rounded:
    """A number rounded to a format.

    Attributes:
        value: the rounded number, exact in double precision; may be Inf or NaN.
        event: ``exact``, ``rounded``, ``subnormal`` (rounded to fewer bits than a normal number has), ``flushed to
            zero``, ``overflow to Inf``, ``saturated`` (to the largest number) or ``NaN``.
    """

    value: float
    event: str


@dataclass(frozen=True)
class FloatFormat:
    """A floating-point format with one sign bit.

    Attributes:
        name: name in configurations and tables.
        exponent_bits: number of exponent bits, biased by ``2^(exponent_bits - 1) - 1``. An exponent of all zeros means
            zero and the subnormal numbers.
        mantissa_bits: number of stored mantissa bits, without the implicit leading one.
        ieee: whether the largest exponent is reserved for Inf and NaN, and overflow gives Inf. Otherwise that exponent
            has finite numbers too, only its all-ones mantissa is NaN, and overflow saturates, including Inf, as in the
            casts of dtrain, and of PyTorch from 2.13 on; before, it gave NaN.
        stored_bits: bits in memory, if more than the format has.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    ieee: bool = True
    stored_bits: int | None = None

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        return 2 - (1 << self.exponent_bits - 1)

    @property
    def max_exponent(self) -> int:
        return (1 << self.exponent_bits - 1) - (1 if self.ieee else 0)

    @property
    def max(self) -> float:
        ulps_below_next_power = 1 if self.ieee else 2  # without Inf, the all-ones mantissa is NaN
        return math.ldexp(2 ** (self.mantissa_bits + 1) - ulps_below_next_power, self.max_exponent - self.mantissa_bits)

    @property
    def min_normal(self) -> float:
        return math.ldexp(1.0, self.min_exponent)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive number."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next number."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def decimal_digits(self) -> float:
        """Precision in decimal digits, counting the implicit leading bit."""
        return (self.mantissa_bits + 1) * math.log10(2)

    @property
    def num_finite(self) -> int:
        exponents = self.max_exponent - self.min_exponent + 2  # plus the exponent of the subnormal numbers
        nans = 0 if self.ieee else 1
        return 2 * ((exponents << self.mantissa_bits) - nans) - 1

    @property
    def binades(self) -> int:
        """Number of powers of two from the smallest subnormal to the largest number."""
        return self.max_exponent - self.min_exponent + self.mantissa_bits + 1

    @property
    def ones_add_up_to(self) -> int:
        """Value at which a sum of ones stops growing if each partial sum is rounded to this format."""
        return int(min(2.0 ** (self.mantissa_bits + 1), self.max))

    @property
    def needs_scaling(self) -> bool:
        """Whether gradients that matter (``LEAST_GRADIENT``) can be below the smallest number."""
        return self.min_subnormal > LEAST_GRADIENT

    def rounded(self, number: Fraction | float) -> Rounded:
        """Rounds ``number`` to the nearest number of this format, ties to even, including subnormal numbers."""
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


def _exponent(number: Fraction) -> int:
    """Returns the exponent of the largest power of two that is at most ``abs(number)``; ``number`` is not 0."""
    numerator, denominator = abs(number.numerator), number.denominator
    exponent = numerator.bit_length() - denominator.bit_length()
    return exponent if Fraction(numerator, denominator) >= Fraction(2) ** exponent else exponent - 1
