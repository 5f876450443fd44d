"""Collectives of a rank as a plan sees them: what is sent, when it starts, and when the rank waits for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

WORLD, SHARD, REPLICATE = "all ranks", "dp_shard", "dp_replicate"
"""Axes of the mesh, by the names in tables."""


@dataclass(frozen=True)
class Transfer:
    """A collective of ``world_size`` ranks, in which a rank receives ``nbytes``.

    ``label`` is its name in messages, ``axis`` one of :data:`WORLD`, :data:`SHARD`, :data:`REPLICATE`, and ``stride``
    the distance of its ranks among all ranks.
    """

    op: str
    nbytes: int
    world_size: int
    label: str = ""
    axis: str = WORLD
    stride: int = 1


class TransferLog(Protocol):
    """What planned ranks tell of their collectives."""

    def start(self, transfer: Transfer) -> int:
        """Returns the number of ``transfer``, which starts now."""

    def wait(self, number: int) -> None:
        """Notes that the rank waits for a transfer."""

    def gathered(self, output: Tensor) -> None:
        """Notes the output of an all-gather, which is about to start."""

    def absent(self) -> AbstractContextManager[None]:
        """Returns a context whose work is that of other ranks."""


@dataclass(frozen=True)
class Moment:
    """What happens ``seconds`` after the beginning: transfer number ``transfer`` starts, or the rank waits for it."""

    seconds: float
    transfer: int
    is_wait: bool


@dataclass(frozen=True)
class RankTrace:
    """What one rank does in some steps, if every transfer takes no time.

    Attributes:
        seconds: the whole.
        moments: in their order.
        transfers: by number.
    """

    seconds: float
    moments: Sequence[Moment]
    transfers: Mapping[int, Transfer]
