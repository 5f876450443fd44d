"""The weight of a micro-batch in the global mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import overload

import torch
from torch import Tensor

from dtrain.errors import UsageError


@dataclass(frozen=True)
class Weight:
    """The weight of one micro-batch.

    Attributes:
        value: 0-dim FP32 on the device.
        is_one: whether the host knows that the value is 1; the multiplication, a pass over memory, is then left out.
            A device is never asked, because waiting for it costs more than the pass.
    """

    value: Tensor
    is_one: bool = False

    @staticmethod
    def of(weight: float | Tensor, device: torch.device, *, micro_batch: int) -> Weight:
        """Returns ``weight``, a number or a 0-dim tensor, as a weight on ``device`` without waiting for it.

        Raises:
            UsageError: not a number, or one that is negative or not finite. The vote checks the value of a tensor,
                which the host lacks.
        """
        if isinstance(weight, Tensor):
            if weight.numel() != 1 or weight.is_complex():
                raise UsageError(
                    f"the weight of micro-batch {micro_batch} is a {weight.dtype} tensor of shape "
                    f"{list(weight.shape)}; expected one real number, such as its token count"
                )
            return Weight(weight.detach().to(device, torch.float32, non_blocking=True).reshape(()))
        if not isinstance(weight, Real) or not 0 <= float(weight) < float("inf"):
            raise UsageError(
                f"the weight of micro-batch {micro_batch} is {weight!r}; expected a finite number >= 0, such as its "
                f"token count"
            )
        # filled in on the device: a copy from pageable host memory would wait
        return Weight(torch.full((), float(weight), dtype=torch.float32, device=device), is_one=weight == 1)


class RankWeights(Sequence[Weight]):
    """The weights of all ranks, cut when they are read: a GPU takes them as one tensor.

    The host reads only values in host memory.

    Args:
        row: FP32 [world_size], contiguous.
    """

    def __init__(self, row: Tensor) -> None:
        self.row = row

    @cached_property
    def _cut(self) -> list[Weight]:
        values = self.row.unbind()
        if self.row.device.type != "cpu":  # reading a device's values would wait for it
            return [Weight(value) for value in values]
        return [Weight(value, number == 1.0) for value, number in zip(values, self.row.tolist(), strict=True)]

    def __len__(self) -> int:
        return self.row.shape[0]

    def __iter__(self) -> Iterator[Weight]:
        return iter(self._cut)

    @overload
    def __getitem__(self, index: int) -> Weight: ...
    @overload
    def __getitem__(self, index: slice) -> RankWeights: ...
    def __getitem__(self, index: int | slice) -> Weight | RankWeights:
        return RankWeights(self.row[index]) if isinstance(index, slice) else self._cut[index]


def joined(weights: Sequence[Weight]) -> Tensor:
    """Returns ``weights`` as FP32 [n]."""
    return weights.row if isinstance(weights, RankWeights) else torch.stack([weight.value for weight in weights])
