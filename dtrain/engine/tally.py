"""What one rank has seen of the step under way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.errors import UsageError


@dataclass(frozen=True)
class TallySummary:
    """The tally as the vote carries it; ``bad_micro_batch`` is -1 where all losses are finite."""

    num_micro_batches: int
    sum_weights: float
    sum_weighted_loss: float
    bad_micro_batch: int


class Tally:
    """The losses and weights of this rank's micro-batches."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._losses: list[Tensor] = []
        self._weights: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, micro_batch: int, loss: Tensor, weight: Tensor) -> None:
        """Notes a backward. Copies: the caller may go on to change either tensor in place before the step."""
        self._numbers.append(micro_batch)
        self._losses.append(loss.detach().clone())
        self._weights.append(weight.clone())

    def has(self, micro_batch: int) -> bool:
        """Whether that micro-batch had its backward."""
        return micro_batch in self._numbers

    def clear(self) -> None:
        """Forgets the step."""
        for entries in (self._numbers, self._losses, self._weights):
            entries.clear()

    def summary(self) -> TallySummary:
        """One read from the device for all of it.

        Raises:
            UsageError: a weight is negative or not finite.
        """
        losses, weights = torch.stack([torch.stack(self._losses), torch.stack(self._weights)]).double().cpu()
        for number, weight in zip(self._numbers, weights.tolist(), strict=True):
            check_weight(weight, f"micro-batch {number}")
        bad = (~losses.isfinite()).nonzero().flatten().tolist()
        # a micro-batch of weight 0 is a dummy: its loss does not count
        weighted = torch.where(weights == 0, 0.0, losses * weights)
        return TallySummary(
            len(self), float(weights.sum()), float(weighted.sum()), self._numbers[bad[0]] if bad else -1
        )


def check_weight(weight: float, where: str) -> None:
    """Refuses what cannot weigh.

    Raises:
        UsageError: ``weight`` is negative or not finite.
    """
    if not 0 <= weight < float("inf"):
        raise UsageError(f"the weight of {where} is {weight}; expected a finite number >= 0, such as its token count")
