"""Copies decisions from the device to the host without a wait, through a ring of pinned buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Readback:
    """Copies small int64 tensors to the host behind the work that is queued on the current stream.

    A buffer is written again after ``num_slots`` posts. It has been read by then, because a step is finalized before
    the next one is posted.

    Args:
        device: device of the tensors.
        num_slots: buffers in the ring.
        of_fake: returns the values that stand for ``n`` fake ones; by default zeros.
    """

    def __init__(
        self, device: torch.device, num_slots: int = 2, of_fake: Callable[[int], Sequence[int]] | None = None
    ) -> None:
        self._of_fake = of_fake
        self._on_gpu = device.type == "cuda"
        self._ring: list[Tensor | None] = [None] * num_slots
        self._next = 0

    def post(self, values: Tensor) -> Callable[[], Any]:
        """Starts the copy of ``values`` int64 [n]; the returned function waits for it and returns numpy int64 [n]."""
        if isinstance(values, FakeTensor):
            n = values.numel()
            return partial(np.array, [0] * n if self._of_fake is None else self._of_fake(n), dtype=np.int64)
        if not self._on_gpu:
            return values.numpy
        slot, self._next = self._next, (self._next + 1) % len(self._ring)
        pinned = self._ring[slot]
        # pinned: a copy to pageable memory would make the host wait
        if pinned is None or pinned.numel() != values.numel():
            pinned = self._ring[slot] = torch.empty_like(values, device="cpu", pin_memory=True)
        pinned.copy_(values, non_blocking=True)
        event: Any = torch.cuda.Event()
        event.record(torch.cuda.current_stream(values.device))  # another device may be the current one
        target = pinned.numpy()

        def read() -> Any:
            event.synchronize()  # for this copy only; work queued after it continues
            return target.copy()  # the buffer is written again

        return read
