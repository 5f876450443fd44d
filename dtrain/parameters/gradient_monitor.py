"""Records gradients as they leave backward: the first that is not finite, and their magnitudes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtrain.parameters.magnitudes import MagnitudeCounts
from dtrain.precision.fake import is_fake


def _sum_dtype(grad: Tensor) -> torch.dtype:
    # a sum of FP16 would overflow by itself; BF16 has the range of FP32, and its own sum is faster on CPU
    return torch.float32 if grad.dtype == torch.float16 else grad.dtype


class GradientMonitor:
    """Records the gradient of each parameter from each micro-batch of this rank, before any other rank's is added.

    Every gradient is summed while it is in the cache; those of a small unit are summed together. A sum is finite unless
    an element is Inf or NaN, or the sum itself overflows. Nothing waits for the device.

    Args:
        num_parameters: trainable parameters of the model, numbered in the order in which backward reaches them.
        found: int64, 0-dim, on a GPU: ``search`` lowers it to the number of the first gradient that is not finite,
            with one launch for the gradients of a flat buffer; its reader resets it. None: ``record_finiteness``
            keeps sums.

    Attributes:
        is_enabled: whether finiteness is recorded. With a single micro-batch on a single rank there is nothing to tell
            apart.
        records_magnitude: whether ``record_magnitude`` records the largest one.
        magnitudes: counts all magnitudes of this step; None: they are not counted.
        is_dummy: whether the micro-batch is a dummy, which is not counted: how many there are depends on the ranks.
        received: numbers of the parameters that have been given a gradient in this step, dummies aside.
    """

    def __init__(self, num_parameters: int, found: Tensor | None = None) -> None:
        self.is_enabled = True
        self.records_magnitude = False
        self.magnitudes: MagnitudeCounts | None = None
        self.is_dummy = False
        self.found = found
        self.received: set[int] = set()
        self._num_parameters = num_parameters
        self._searches: dict[int, Any] = {}  # by the number of their first gradient
        self._maxima: list[Tensor] = []
        self._no_maximum: Tensor | None = None
        self._sums: dict[torch.dtype, Tensor] = {}
        self._elements: dict[torch.dtype, Sequence[Tensor]] = {}  # of the sums, each 0-dim
        self._numbers: dict[torch.dtype, list[int]] = {}

    def begin(self, device: torch.device, *, is_only: bool, is_dummy: bool, calibrates: bool) -> None:
        """Begins a micro-batch: the only one of a step over all ranks, a dummy, or one that a loss scale measures."""
        self.is_enabled, self.is_dummy, self.records_magnitude = not is_only, is_dummy, calibrates
        if calibrates:
            self.count_magnitudes(device)

    def count_magnitudes(self, device: torch.device) -> None:
        """Counts all magnitudes of this step from now on."""
        if self.magnitudes is None:
            self.magnitudes = MagnitudeCounts(self._num_parameters, device)

    def receive(self, *numbers: int) -> None:
        """Records that parameters ``numbers`` have been given a gradient."""
        if not self.is_dummy:
            self.received.update(numbers)

    @property
    def keeps_sums(self) -> bool:
        """Whether ``record_finiteness`` records anything."""
        return self.is_enabled and self.found is None

    def are_finite(self, buffers: Sequence[Tensor]) -> bool:
        """Whether sums prove all elements finite; False for fake tensors, and on a GPU, where the host would wait."""
        for buffer in buffers:
            if buffer.device.type != "cpu" or is_fake(buffer):
                return False
            if not math.isfinite(float(buffer.sum(dtype=_sum_dtype(buffer)))):
                return False
        return True

    def record_finiteness(self, micro_batch: int, number: int, grad: Tensor) -> None:
        """Records the gradient of parameter ``number``, or a part of it; any floating dtype."""
        if not self.keeps_sums:
            return
        dtype = _sum_dtype(grad)
        numbers = self._numbers.setdefault(dtype, [])
        if dtype not in self._sums:
            # one tensor: small ones between the gradients would keep malloc from using their memory again
            self._keep_sums(torch.empty(self._num_parameters, dtype=dtype, device=grad.device))
        elif len(numbers) == len(self._sums[dtype]):
            self._keep_sums(self._sums[dtype].repeat(2))
        torch.sum(grad, dim=(), dtype=dtype, out=self._elements[dtype][len(numbers)])
        # ordered by micro-batch, then by backward, so the least number is the gradient that went wrong first
        numbers.append(micro_batch * self._num_parameters + number)

    def _keep_sums(self, sums: Tensor) -> None:
        # cut once, because to index one for each gradient takes longer than a small gradient's sum
        self._sums[sums.dtype], self._elements[sums.dtype] = sums, sums.unbind()

    def search(self, micro_batch: int, grads: Sequence[tuple[int, Tensor]]) -> None:
        """Records the gradients of a flat buffer, or their parts, with the numbers of their parameters."""
        if not self.is_enabled or self.found is None:
            return
        first, _ = grads[0]
        if first not in self._searches:
            from dtrain.kernels.nonfinite import NonfiniteSearch  # it imports Triton, which is for GPUs

            self._searches[first] = NonfiniteSearch(grads)
        self._searches[first].search(grads, micro_batch * self._num_parameters, self.found)

    def finiteness(self) -> tuple[Sequence[int], Tensor | None]:
        """Returns the number of each gradient (micro-batch x parameters + parameter), and which are bad: bool."""
        numbers = [number for own in self._numbers.values() for number in own]
        bad = [~self._sums[dtype][: len(own)].isfinite() for dtype, own in self._numbers.items()]
        return numbers, torch.cat(bad) if numbers else None

    def record_magnitude(self, number: int, grad: Tensor, *, num_padding: int = 0) -> None:
        """Records the magnitudes of a gradient as it leaves backward, neither weighted nor summed.

        Args:
            number: of the parameter.
            grad: its whole gradient from one micro-batch.
            num_padding: zeros in it beside its own elements.
        """
        if not grad.numel():
            return
        if self.records_magnitude:
            self._maxima.append(grad.abs().amax())
        if self.magnitudes is not None and not self.is_dummy:
            self.magnitudes.add(number, grad, num_padding=num_padding)

    def max_abs(self, device: torch.device) -> Tensor:
        """Returns the largest recorded magnitude of this step: 0-dim FP64 on ``device``, 0 if none was recorded."""
        if not self._maxima:
            if self._no_maximum is None:  # kept: one launch less in each step
                self._no_maximum = torch.zeros((), dtype=torch.float64, device=device)
            return self._no_maximum
        # widened, because stack takes one dtype
        return torch.stack([maximum.double() for maximum in self._maxima]).amax()

    def clear(self) -> None:
        self._maxima.clear()
        self._numbers.clear()
        self.received.clear()
        self.magnitudes = None
