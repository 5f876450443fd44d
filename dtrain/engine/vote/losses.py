"""What one rank has seen of the losses of the step under way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.engine.vote.record import first_index, upload
from dtrain.errors import UsageError


@dataclass(frozen=True)
class LossSummary:
    """The tally as the vote carries it; 0-dim tensors on the device, FP64 and int64."""

    sum_weights: Tensor
    sum_weighted_loss: Tensor
    bad_loss: Tensor
    num_bad_losses: Tensor
    bad_micro_batch: Tensor
    bad_weight: Tensor


class LossAccumulator:
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

    def summary(self) -> LossSummary:
        """All of it on the device; nothing waits."""
        values = torch.stack((*self._losses, *self._weights)).double().view(2, len(self))
        losses, weights = values.unbind()
        bad = ~values.isfinite()
        bad[1] |= weights < 0
        first = first_index(bad, upload(self._numbers, values.device))
        return LossSummary(
            sum_weights=weights.sum(),
            # a micro-batch of weight 0 is a dummy: its loss does not count
            sum_weighted_loss=(losses * weights).masked_fill(weights == 0, 0.0).sum(),
            bad_loss=torch.where(bad[0], losses, 0.0).gather(0, bad[0].byte().argmax(dim=0, keepdim=True))[0],
            num_bad_losses=bad[0].sum(),
            bad_micro_batch=first[0],
            bad_weight=first[1],
        )


def check_weight(weight: float, where: str) -> None:
    """Refuses what cannot weigh.

    Raises:
        UsageError: ``weight`` is negative or not finite.
    """
    if not 0 <= weight < float("inf"):
        raise UsageError(f"the weight of {where} is {weight}; expected a finite number >= 0, such as its token count")
