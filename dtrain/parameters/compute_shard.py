"""A part of the compute weights that a rank keeps between steps, beside its masters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

COMPUTE = "compute replica"

ALL_OWNERS = -1
"""Owner of an interval whose elements come from the masters of several ranks."""


@dataclass(frozen=True)
class ComputeShard:
    """An interval of one parameter's compute weights on this rank.

    Attributes:
        name: of the parameter.
        kind: ``compute replica``, with the copy if there are several.
        start: the first element, row-major.
        data: [length], the live values.
        owner: the rank from whose master the values come; this rank if it holds that master itself; or
            ``ALL_OWNERS``.
        source: what ``data`` equals bit for bit once it is cast to the dtype of ``data``; None if another rank holds
            the master, or if the owner's ``data`` is the master.
        is_gathered: whether all ranks hold the same interval, in the same order of intervals.
        is_master: whether the owner's ``data`` is the storage of its master, or a half of it.
    """

    name: str
    kind: str
    start: int
    data: Tensor
    owner: int
    source: Tensor | None
    is_gathered: bool
    is_master: bool = False
