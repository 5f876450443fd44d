"""Which gradient was the first that is not finite: noted as gradients pass by, read only if a step is skipped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class GradientWatch:
    """Sums every gradient once: the sum is finite unless an element is Inf or NaN (or the sum itself overflows).

    What is watched is one parameter's gradient from one micro-batch of this rank, before any other rank's is added. The
    sum is taken while the gradient is hot in cache.

    Args:
        num_parameters: trainable parameters of the model, numbered in the order in which backward reaches them.
    """

    def __init__(self, num_parameters: int) -> None:
        self._num_parameters = num_parameters
        self._sums: dict[torch.dtype, list[Tensor]] = {}
        self._numbers: dict[torch.dtype, list[int]] = {}

    def look(self, micro_batch: int, first: int, grads: Sequence[Tensor]) -> None:
        """Notes the gradients of parameters ``first``, ``first + 1``, ...; any floating dtype, one for all."""
        dtype = grads[0].dtype
        # a sum of FP16 would overflow by itself; BF16 has the range of FP32, and its own sum is faster on CPU
        wide = torch.float32 if dtype == torch.float16 else None
        self._sums.setdefault(dtype, []).extend(grad.sum(dtype=wide) for grad in grads)
        start = micro_batch * self._num_parameters + first
        self._numbers.setdefault(dtype, []).extend(range(start, start + len(grads)))

    def seen(self) -> tuple[Sequence[int], Tensor | None]:
        """The numbers of all gradients of this step (micro-batch x parameters + parameter), and which are bad: bool."""
        numbers = [number for own in self._numbers.values() for number in own]
        bad = [~torch.stack(sums).isfinite() for sums in self._sums.values()]
        return numbers, torch.cat(bad) if bad else None

    def clear(self) -> None:
        """Forgets the step."""
        self._sums.clear()
        self._numbers.clear()
