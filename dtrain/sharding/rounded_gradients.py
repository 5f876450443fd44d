"""Gradients in a BF16 main grad: each sum is formed in FP32 and rounded stochastically when it is stored.

So the expected value is exact, and addends that are too small for BF16 are not lost. The random bits follow from the
step, the addition within it and the element's place, so a resumed run draws the same ones. What is stored without a sum
- the gradient of a step's only micro-batch on a single rank - is copied, and so not rounded.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from dtrain.optim.stochastic import random_bits, round_to_bf16, step_words, stream_start
from dtrain.parameters.micro_batch_weight import Weight, joined
from dtrain.parameters.squares import chunk_norms
from dtrain.precision.fake import block_starts, is_fake
from dtrain.precision.hardware import has_compiler
from dtrain.sharding.accumulate import GradientSum, add_scaled
from dtrain.sharding.layout import CHUNK

_BLOCK = {"cpu": 1 << 17}  # elements that are summed at a time: their FP32 values stay in a core's cache
_LARGE_BLOCK = 1 << 24  # on other devices: temporaries of 64 MiB
_MAX_ADDITIONS = 1 << 12  # of a step, that have random bits of their own


class StepNoise:
    """Seed of the random bits of all sums of a step; an element's place is added to it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._step = 0
        self._words: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, step: int) -> None:
        """Begins attempted step ``step``."""
        if step != self._step:
            self._step = step
            self._words.clear()

    def words(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns two 0-dim int32 tensors for addition ``number`` of the step."""
        number %= _MAX_ADDITIONS
        if number not in self._words:
            # negative, because the states of the optimizer are rounded by the positive numbers of the steps
            self._words[number] = step_words(~(self._step * _MAX_ADDITIONS + number), self.device)
        return self._words[number]


class RoundedSum(GradientSum):
    """Sums gradients over one step in BF16: those of a shard, or this rank's own ones of a parameter.

    Args:
        main_grad: BF16 [n]; of a shard, a whole number of chunks.
        origin: name of the flat buffer, and the index of the first element there.
        noise: of the step.
    """

    def __init__(self, main_grad: Tensor, origin: tuple[str, int], noise: StepNoise) -> None:
        super().__init__(main_grad)
        self._key, self._first = zlib.crc32(f"{origin[0]} main_grad".encode()), origin[1]
        self._noise = noise
        self._number = 0  # of the last addition in its step
        self._starts: dict[int, Tensor] = {}
        self._uses_kernel = main_grad.device.type == "cuda" and has_compiler(main_grad.device)

    def push(self, grads: Sequence[Tensor], weights: Sequence[Weight], *, is_last: bool = False) -> None:
        self._add(grads, weights, is_first=self._empty)
        self._empty = False
        is_cpu = self._main_grad.device.type == "cpu"
        self.norms = chunk_norms(self._main_grad.view(-1, CHUNK)) if is_last and is_cpu else None

    def accumulate(self, grad: Tensor, weight: Weight, *, is_first: bool) -> None:
        """Adds this rank's ``grad`` of any shape; the first of a step overwrites the last step's sum."""
        self._add([grad.reshape(-1).contiguous()], [weight], is_first=is_first)

    def _add(self, rows: Sequence[Tensor], weights: Sequence[Weight], *, is_first: bool) -> None:
        """Adds ``rows`` [n], contiguous, times ``weights`` in their order; the first addition drops the old values."""
        self._number = 0 if is_first else self._number + 1
        if is_first and len(rows) == 1 and rows[0].dtype == torch.bfloat16 and weights[0].is_one:
            self._main_grad.copy_(rows[0])
            return
        if is_fake(self._main_grad):  # the other ranks' take the same memory, one after the other
            rows, weights = rows[:3], weights[:3]
        words = self._noise.words(self._number)
        if self._uses_kernel:
            from dtrain.kernels.rows import add_rows  # it imports Triton, which a CPU build of torch does not have

            noise = self._start(0), *words
            add_rows(self._main_grad, _as_matrix(rows), joined(weights), overwrites=is_first, noise=noise)
            return
        size = _BLOCK.get(self._main_grad.device.type, _LARGE_BLOCK)
        for start in block_starts(self._main_grad, size):
            block = slice(start, start + size)
            target = self._main_grad[block]
            total = target.float()
            if is_first:
                add_scaled([total], [rows[0][block]], weights[0], is_first=True)
            for row, weight in zip(rows[int(is_first) :], weights[int(is_first) :], strict=True):
                add_scaled([total], [row[block]], weight)
            bits = random_bits((self._start(start), *words), total).bitwise_and_(0xFFFF)
            target.copy_(round_to_bf16(total, bits))

    def _start(self, offset: int) -> Tensor:
        if offset not in self._starts:
            self._starts[offset] = stream_start(self._key, self._first + offset, self._noise.device)
        return self._starts[offset]


def _as_matrix(rows: Sequence[Tensor]) -> Tensor:
    """Returns ``rows``, which lie at equal distances in one buffer, as a GPU receives them, as one tensor."""
    numel = rows[0].numel()
    stride = int(rows[1].storage_offset() - rows[0].storage_offset()) if len(rows) > 1 else numel
    return rows[0].as_strided((len(rows), numel), (stride, 1))
