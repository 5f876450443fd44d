"""Which gradient leaf was the first that is not finite: noted as the leaves pass by, read only if a step is skipped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LeafWatch:
    """Sums every leaf once: the sum is finite unless an element is Inf or NaN (or the sum itself overflows).

    A leaf is one flat buffer's gradient of one micro-batch, numbered in the order in which backward completes them.
    The sum is taken while the leaf is hot in cache: 0.05 ns an element on CPU.

    Args:
        num_flats: flat buffers of the model.
    """

    def __init__(self, num_flats: int) -> None:
        self._num_flats = num_flats
        self._sums: dict[torch.dtype, list[Tensor]] = {}
        self._leaves: dict[torch.dtype, list[int]] = {}

    def look(self, micro_batch: int, flat: int, leaf: Tensor) -> None:
        """Notes the leaf of flat buffer number ``flat``, any floating dtype."""
        # a sum of FP16 would overflow by itself; BF16 has the range of FP32, and its own sum is three times faster
        total = leaf.sum(dtype=torch.float32) if leaf.dtype == torch.float16 else leaf.sum()
        self._sums.setdefault(leaf.dtype, []).append(total)
        self._leaves.setdefault(leaf.dtype, []).append(micro_batch * self._num_flats + flat)

    def leaves(self) -> tuple[Sequence[int], Tensor | None]:
        """The numbers of all leaves of this step, and whether each was bad: bool, on the device."""
        numbers = [number for leaves in self._leaves.values() for number in leaves]
        bad = [~torch.stack(sums).isfinite() for sums in self._sums.values()]
        return numbers, torch.cat(bad) if bad else None

    def place(self, leaf: int) -> tuple[int, int]:
        """(micro-batch, flat buffer) of the leaf with that number."""
        return divmod(leaf, self._num_flats)

    def clear(self) -> None:
        """Forgets the step."""
        self._sums.clear()
        self._leaves.clear()
