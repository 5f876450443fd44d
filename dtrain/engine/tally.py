"""What one rank has seen of the losses of the step under way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.engine.vote import first_index, upload
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

    def summary(self) -> LossSummary:
        """All of it on the device; nothing waits."""
        losses, weights = torch.stack(self._losses).double(), torch.stack(self._weights).double()
        numbers = upload(self._numbers, losses.device)
        bad = ~losses.isfinite()
        # a micro-batch of weight 0 is a dummy: its loss does not count
        weighted = torch.where(weights == 0, 0.0, losses * weights)
        return LossSummary(
            sum_weights=weights.sum(),
            sum_weighted_loss=weighted.sum(),
            bad_loss=torch.where(bad.any(), losses.gather(0, bad.byte().argmax(dim=0, keepdim=True))[0], 0.0),
            num_bad_losses=bad.sum(),
            bad_micro_batch=first_index(bad, numbers),
            bad_weight=first_index(~((weights >= 0) & weights.isfinite()), numbers),
        )


def check_weight(weight: float, where: str) -> None:
    """Refuses what cannot weigh.

    Raises:
        UsageError: ``weight`` is negative or not finite.
    """
    if not 0 <= weight < float("inf"):
        raise UsageError(f"the weight of {where} is {weight}; expected a finite number >= 0, such as its token count")
