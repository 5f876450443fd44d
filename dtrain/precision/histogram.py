"""Histograms of magnitudes by power of two, and what a format would do to the numbers counted.

A bin holds one exponent of FP32, and exact powers of two have bins of their own: the largest number that a format
flushes to zero is a power of two (half of its smallest number, which rounds to even), so counts are exact for every
power-of-two scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.precision.formats import FloatFormat

NUM_BINS = 512
"""Two bins an exponent: powers of two, and the numbers up to the next one."""

_ZERO, _SUBNORMAL, _INF, _NAN = 0, 1, 510, 511
_BIAS = 127
_CHUNK = 1 << 18  # elements at a time, so that the integers stay in a CPU's cache
_GPU_CHUNK = 1 << 24
_GPU_LANES = 128  # copies of the bins, because most elements of a gradient share a few


def count_magnitudes(x: Tensor) -> Tensor:
    """Returns the number of elements of ``x``, of any floating dtype and shape, in each bin: int64 [512].

    The host does not wait for the device.
    """
    counts = torch.zeros(NUM_BINS, dtype=torch.int64, device=x.device)
    add_magnitudes(counts, x)
    return counts


def add_magnitudes(counts: Tensor, x: Tensor) -> None:
    """Adds what ``count_magnitudes`` returns to ``counts``, int64 [512]."""
    chunk, num_lanes = (_GPU_CHUNK, _GPU_LANES) if x.device.type == "cuda" else (_CHUNK, 1)
    for part in x.detach().reshape(-1).split(chunk):
        _add_chunk(counts, part, num_lanes)


def _add_chunk(counts: Tensor, part: Tensor, num_lanes: int) -> None:
    bits = part.float().view(torch.int32) & 0x7FFFFFFF
    bins = (bits >> 23).mul_(2).add_((bits & 0x7FFFFF).clamp_(max=1)).long()
    target = counts
    if num_lanes > 1:
        bins += torch.arange(bins.numel(), device=bins.device).remainder_(num_lanes).mul_(NUM_BINS)
        target = counts.new_zeros(num_lanes * NUM_BINS)
    # not bincount, for which the host would read the largest bin
    target.scatter_add_(0, bins, torch.ones_like(bins))
    if num_lanes > 1:
        counts += target.view(num_lanes, NUM_BINS).sum(0)


@dataclass(frozen=True)
class Histogram:
    """Numbers counted by ``count_magnitudes``, on the host.

    Attributes:
        counts: number of elements by bin.
    """

    counts: tuple[int, ...]

    @staticmethod
    def of(x: Tensor) -> Histogram:
        """Returns the histogram of ``x``; see ``count_magnitudes``."""
        return Histogram(tuple(count_magnitudes(x).tolist()))

    @staticmethod
    def from_dict(values: Mapping[str, int | Mapping[str, int]]) -> Histogram:
        """Returns the histogram that ``to_dict`` describes."""
        counts = [0] * NUM_BINS
        special = {"zeros": _ZERO, "fp32_subnormals": _SUBNORMAL, "infinite": _INF, "nan": _NAN}
        for key, value in values.items():
            if isinstance(value, Mapping):
                offset = 0 if key == "powers_of_two" else 1
                for exponent, number in value.items():
                    counts[_first_bin(int(exponent)) + offset] = number
            else:
                counts[special[key]] = value
        return Histogram(tuple(counts))

    def to_dict(self) -> dict[str, int | dict[str, int]]:
        """Returns plain values for JSON, without empty bins; exponents are those of 2."""
        counts = self.counts
        return {
            "zeros": counts[_ZERO],
            "fp32_subnormals": counts[_SUBNORMAL],
            "infinite": counts[_INF],
            "nan": counts[_NAN],
            **{
                name: {
                    str(exponent): counts[_first_bin(exponent) + offset]
                    for exponent in self._exponents()
                    if counts[_first_bin(exponent) + offset]
                }
                for offset, name in enumerate(("powers_of_two", "between"))
            },
        }

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    def scaled(self, scale: float) -> Histogram:
        """Returns the histogram of the numbers times ``scale``, a power of two.

        Numbers that leave the normal range of FP32 are counted as its subnormal or as infinite ones; those that are
        subnormal in FP32 stay so.
        """
        shift = 2 * _power(scale)
        counts = [0] * NUM_BINS
        for index, number in enumerate(self.counts):
            moved = index
            if _SUBNORMAL < index < _INF:
                moved = index + shift
                moved = _SUBNORMAL if moved <= _SUBNORMAL else min(moved, _INF)
            counts[moved] += number
        return Histogram(tuple(counts))

    @property
    def total(self) -> int:
        """Number of elements, zeros and non-finite ones included."""
        return sum(self.counts)

    @property
    def zeros(self) -> int:
        """Number of elements that are zero."""
        return self.counts[_ZERO]

    @property
    def num_nonfinite(self) -> int:
        """Number of elements that are Inf or NaN."""
        return self.counts[_INF] + self.counts[_NAN]

    @property
    def num_nonzero(self) -> int:
        """Number of finite elements other than zero."""
        return self.total - self.zeros - self.num_nonfinite

    @property
    def top_exponent(self) -> int | None:
        """Largest e with an element of magnitude at least 2^e; None without any finite element other than zero."""
        return max(self._exponents(), default=None)

    def by_exponent(self) -> dict[int, int]:
        """Returns {e: number of elements in [2^e, 2^(e + 1))} without empty ones; FP32's subnormals are left out."""
        return {e: self.counts[_first_bin(e)] + self.counts[_first_bin(e) + 1] for e in self._exponents()}

    def flushed(self, floats: FloatFormat, scale: float = 1.0) -> int:
        """Returns how many nonzero elements, times ``scale``, round to zero in ``floats``.

        Args:
            scale: a power of two.

        Raises:
            ValueError: ``scale`` is no power of two.
        """
        # at most half of the smallest number; the tie rounds to even, which is zero
        return self._up_to(math.log2(floats.min_subnormal / 2) - _power(scale))

    def subnormal(self, floats: FloatFormat, scale: float = 1.0) -> int:
        """Returns how many nonzero elements, times ``scale``, are below the normal range of ``floats``, or flushed.

        They keep fewer bits than a normal number. Arguments and errors as in ``flushed``.
        """
        limit = floats.min_exponent - _power(scale)
        return self._up_to(limit) - self._at(limit)

    def overflowing(self, floats: FloatFormat, scale: float = 1.0) -> int:
        """Returns how many finite elements, times ``scale``, reach the power of two above the range of ``floats``.

        Numbers between its largest number and that power are not counted. Arguments and errors as in ``flushed``.
        """
        limit = floats.max_exponent + 1 - _power(scale)
        return self.num_nonzero - self._up_to(limit) + self._at(limit)

    def _exponents(self) -> Sequence[int]:
        occupied = [i for i in range(_SUBNORMAL + 1, _INF) if self.counts[i]]
        return sorted({i // 2 - _BIAS for i in occupied})

    def _up_to(self, exponent: float) -> int:
        """Returns the number of nonzero elements with magnitude at most 2^exponent, which is a normal FP32 number."""
        if exponent < 1 - _BIAS:
            return 0
        return sum(self.counts[_SUBNORMAL : min(_first_bin(int(exponent)) + 1, _INF)])

    def _at(self, exponent: int) -> int:
        return self.counts[_first_bin(exponent)] if 1 - _BIAS <= exponent <= _BIAS else 0


def share(part: int, whole: int) -> float:
    """Returns ``part / whole``, 0 for nothing of nothing."""
    return part / whole if whole else 0.0


def _first_bin(exponent: int) -> int:
    return (exponent + _BIAS) * 2


def _power(scale: float) -> int:
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5:
        raise ValueError(f"expected a power of two as the scale, got {scale}")
    return exponent - 1
