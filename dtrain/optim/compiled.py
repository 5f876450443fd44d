"""A formula compiled into one pass over memory.

The pass reads main grad, master and states, and writes master, states and replica: 30 bytes an element for AdamW with a
BF16 replica, 28 if the replica is a half of the master. ``torch.compile`` makes it a fused loop in C++ on a CPU, and a
Triton kernel on a GPU. Everything that may change is a tensor, so there is one graph for each kind of replica and one
for the coefficients, and none per size, step or hyper-parameter. No result depends on an element's position, so any cut
and any sharding give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from dtrain.errors import ConfigError
from dtrain.optim.formula import MAX_BLOCK, Formula
from dtrain.optim.rule import UpdateScalars, UpdateSlice
from dtrain.optim.stochastic import Noise, step_words, stream_start
from dtrain.precision.remainder import RemainderPair, join, split

_COPIED_BLOCK = 128 * 1024
"""Elements of a call whose masters are copied: few enough to stay in a CPU's cache."""


def _update(
    formula: Formula,
    masters: tuple[Tensor, ...],
    tensors: tuple[Tensor, ...],
    replica: Tensor | None,
    weight_decay: Tensor,
    shared: Tensor,
    noise: Noise | None,
) -> None:
    """Updates in place; master and states keep their bits if the update is skipped.

    ``masters``: the FP32 master, or the two halves of a pair; ``tensors``: main grad and states.
    """
    master = masters[0] if len(masters) == 1 else join(*masters)
    moved, *new = formula.updated((master, *tensors), weight_decay, shared, noise)
    skip = shared[1] != 0
    # a select: a product with zero would be NaN if the gradient is Inf
    moved = torch.where(skip, master, moved)
    for old, value in zip(masters, (moved,) if len(masters) == 1 else split(moved), strict=True):
        old.copy_(value)
    for old, value in zip(tensors[1:], new, strict=True):
        old.copy_(torch.where(skip, old, value))
    if replica is not None:
        replica.copy_(moved)


@cache  # engines of one process share the graphs
def _compiled(formula: Formula) -> tuple[Callable[..., Tensor], Callable[..., None]]:
    """Returns ``Formula.shared`` and ``_update`` for one formula."""

    def compiled(function: Any) -> Any:
        # code of its own, because torch refuses many graphs of one code object
        own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        return partial(torch.compile(own, dynamic=True, fullgraph=True), formula)

    return compiled(Formula.shared), compiled(_update)


@dataclass(frozen=True)
class _Slice:
    """Tensors of one slice for the compiled update; ``start`` is its place in the random numbers, if it needs any.

    ``masters`` is None for a pair that is read before the update and written after it: torch's compiler makes loops of
    vectors for a CPU only without 16-bit integers.
    """

    masters: tuple[Tensor, ...] | None
    pair: RemainderPair | None
    tensors: tuple[Tensor, ...]
    replica: Tensor | None
    weight_decay: Tensor
    lr_factor: float
    start: Tensor | None


class CompiledUpdate:
    """The compiled update of the segments of an arena, built before the first step.

    Args:
        name: of the optimizer, for messages.
        formula: its update.
        constants: returns what the formula is given, on a device.
        segments: the slices of each segment, of any update classes.
        is_rounded: whether a state is BF16.

    Raises:
        ConfigError: the compiler failed.
    """

    def __init__(
        self,
        name: str,
        formula: Formula,
        constants: Callable[[torch.device], Tensor],
        segments: Sequence[Sequence[UpdateSlice]],
        *,
        is_rounded: bool,
    ) -> None:
        self._name = name
        self._constants = constants
        self._is_rounded = is_rounded
        self._coefficients, self._update = _compiled(formula)
        self._segments = [
            [self._slice(block) for part in segment for block in part.cut(_block(part))] for segment in segments
        ]
        self._scalars: UpdateScalars | None = None
        self._shared: dict[float, Tensor] = {}
        self._words: tuple[Tensor, Tensor] | None = None
        self._build([part for segment in self._segments for part in segment])

    def update(self, numbers: Sequence[int], scalars: UpdateScalars) -> None:
        """Updates the segments ``numbers``; the main grads are left as they were."""
        for part in (part for number in numbers for part in self._segments[number]):
            device = part.weight_decay.device
            if scalars is not self._scalars:  # the first slice of this update
                self._scalars, self._shared = scalars, {}
                self._words = step_words(scalars.step, device) if self._is_rounded else None
            if part.lr_factor not in self._shared:
                own = scalars.scaled(part.lr_factor)
                self._shared[part.lr_factor] = self._coefficients(
                    self._constants(device), *own.tensors, own.grad_factor
                )
            self._run(part, self._shared[part.lr_factor])

    def _run(self, part: _Slice, shared: Tensor) -> None:
        noise = None if part.start is None or self._words is None else (part.start, *self._words)
        masters = part.masters
        if masters is None:
            assert part.pair is not None
            masters = (part.pair.read(),)
        self._update(masters, part.tensors, part.replica, part.weight_decay, shared, noise)
        if part.masters is None and part.pair is not None:
            part.pair.write(masters[0])

    def _slice(self, part: UpdateSlice) -> _Slice:
        master, device = part.master, part.master.device
        pair = master if isinstance(master, RemainderPair) else None
        masters = (master,) if isinstance(master, Tensor) else master.bits
        return _Slice(
            None if pair is not None and _copies_pairs(device) else tuple(map(_rebased, masters)),
            pair,
            tuple(map(_rebased, (part.main_grad, *part.states))),
            None if part.replica is None else _rebased(part.replica),
            torch.full((), part.update_class.weight_decay, dtype=torch.float32, device=device),
            part.update_class.lr_factor,
            stream_start(*part.origin, device) if self._is_rounded else None,
        )

    @torch.no_grad()
    def _build(self, slices: Sequence[_Slice]) -> None:
        """Compiles for each kind of replica in ``slices`` by a skipped update, which changes no bit."""
        if not slices:  # a rank may have none
            return
        device = slices[0].weight_decay.device
        # separate tensors, because a graph is specialized on which of its inputs are the same one
        skipped_by = [torch.ones((), dtype=torch.float32, device=device) for _ in range(5)]
        self._words = step_words(1, device) if self._is_rounded else None
        # the largest of each kind, because the number of threads of a loop is decided for the first size
        by_size = sorted(slices, key=lambda part: part.tensors[0].numel())
        largest = {(part.pair is None, None if part.replica is None else part.replica.dtype): part for part in by_size}
        try:
            # one graph more for each mode of torch (threads, deterministic kernels) that the process has been in
            with torch._dynamo.config.patch(recompile_limit=64):
                shared = self._coefficients(self._constants(device), *skipped_by)
                for part in largest.values():
                    self._run(part, shared)
        except RuntimeError as error:  # all failures of the compiler are
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"the update cannot be compiled on {device} ({type(error).__name__}: {reason}); install a C++ "
                f"compiler, and Triton on a GPU, or set optim.compile=false, {self._name}(compile=False)"
            ) from error


def _copies_pairs(device: torch.device) -> bool:
    """Whether pairs are read before the compiled pass and written after it; else they are joined and split in it."""
    return device.type == "cpu"


def _block(part: UpdateSlice) -> int:
    """Returns the number of elements that are updated in one call."""
    is_copied = isinstance(part.master, RemainderPair) and _copies_pairs(part.master.device)
    return _COPIED_BLOCK if is_copied else MAX_BLOCK


def _rebased(tensor: Tensor) -> Tensor:
    """Returns ``tensor`` with offset 0, because a compiled graph is specialized on the offsets."""
    found: Tensor = from_dlpack(tensor.detach())
    return found
