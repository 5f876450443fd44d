"""A formula compiled into one pass over memory.

The pass reads main grad, master and states, and writes master, states and replica: 30 bytes an element for AdamW with a
BF16 replica. ``torch.compile`` makes it a fused loop in C++ on a CPU, and a Triton kernel on a GPU. Everything that may
change is a tensor, so there is one graph for each kind of replica and one for the coefficients, and none per size, step
or hyper-parameter. No result depends on an element's position, so any cut and any sharding give the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from dtrain.distributed.logging import logger
from dtrain.errors import ConfigError
from dtrain.optim.formula import MAX_BLOCK, Formula, FormulaRule
from dtrain.optim.rule import UpdateScalars, UpdateSlice
from dtrain.optim.stochastic import Noise, step_words, stream_start


def _update(
    formula: Formula,
    tensors: tuple[Tensor, ...],
    replica: Tensor | None,
    weight_decay: Tensor,
    shared: Tensor,
    noise: Noise | None,
) -> None:
    """Updates in place; master and states keep their bits if the update is skipped."""
    new = formula.updated(tensors, weight_decay, shared, noise)
    master, _, *states = tensors
    skip = shared[1] != 0
    for old, value in zip((master, *states), new, strict=True):
        # a select: a product with zero would be NaN if the gradient is Inf
        old.copy_(torch.where(skip, old, value))
    if replica is not None:
        replica.copy_(master)


@cache  # engines of one process share the graphs
def _compiled(formula: Formula) -> tuple[Callable[..., Tensor], Callable[..., None]]:
    """Returns :meth:`Formula.shared` and :func:`_update` for one formula."""

    def compiled(function: Any) -> Any:
        # code of its own, because torch refuses many graphs of one code object
        own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        return partial(torch.compile(own, dynamic=True, fullgraph=True), formula)

    return compiled(Formula.shared), compiled(_update)


@dataclass(frozen=True)
class _Slice:
    """Tensors of one slice for the compiled update; ``start`` is its place in the random numbers, if it needs any."""

    tensors: tuple[Tensor, ...]
    replica: Tensor | None
    weight_decay: Tensor
    lr_factor: float
    start: Tensor | None


class CompiledUpdate:
    """The compiled update of the segments of an arena, built before the first step.

    Args:
        rule: the optimizer.
        segments: the slices of each segment, of any update classes.

    Raises:
        ConfigError: the compiler failed.
    """

    def __init__(self, rule: FormulaRule, segments: Sequence[Sequence[UpdateSlice]]) -> None:
        self._rule = rule
        self._coefficients, self._update = _compiled(rule.formula)
        self._segments = [
            [self._slice(block) for part in segment for block in part.cut(MAX_BLOCK)] for segment in segments
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
                self._words = step_words(scalars.step, device) if self._rule.is_rounded else None
            if part.lr_factor not in self._shared:
                own = scalars.scaled(part.lr_factor)
                self._shared[part.lr_factor] = self._coefficients(
                    self._rule.constants(device), *own.tensors, own.grad_factor
                )
            self._run(part, self._shared[part.lr_factor])

    def _run(self, part: _Slice, shared: Tensor) -> None:
        noise = None if part.start is None or self._words is None else (part.start, *self._words)
        self._update(part.tensors, part.replica, part.weight_decay, shared, noise)

    def _slice(self, part: UpdateSlice) -> _Slice:
        device = part.master.device
        return _Slice(
            tuple(map(_rebased, (part.master, part.main_grad, *part.states))),
            None if part.replica is None else _rebased(part.replica),
            torch.full((), part.update_class.weight_decay, dtype=torch.float32, device=device),
            part.update_class.lr_factor,
            stream_start(*part.origin, device) if self._rule.is_rounded else None,
        )

    @torch.no_grad()
    def _build(self, slices: Sequence[_Slice]) -> None:
        """Compiles for each kind of replica in ``slices`` by a skipped update, which changes no bit."""
        if not slices:  # a rank may have none
            return
        started = time.perf_counter()
        device = slices[0].weight_decay.device
        # separate tensors, because a graph is specialized on which of its inputs are the same one
        skipped_by = [torch.ones((), dtype=torch.float32, device=device) for _ in range(5)]
        self._words = step_words(1, device) if self._rule.is_rounded else None
        # the largest of each kind, because the number of threads of a loop is decided for the first size
        by_size = sorted(slices, key=lambda part: part.tensors[0].numel())
        largest = {None if part.replica is None else part.replica.dtype: part for part in by_size}
        try:
            # one graph more for each mode of torch (threads, deterministic kernels) that the process has been in
            with torch._dynamo.config.patch(recompile_limit=64):
                shared = self._coefficients(self._rule.constants(device), *skipped_by)
                for part in largest.values():
                    self._run(part, shared)
        except RuntimeError as error:  # all failures of the compiler are
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"the update cannot be compiled on {device} ({type(error).__name__}: {reason}); install a C++ "
                f"compiler, and Triton on a GPU, or set optim.compile=false, {self._rule.name}(compile=False)"
            ) from error
        logger.info("optimizer: %s compiled in %.1f s", self._rule.name, time.perf_counter() - started)


def _rebased(tensor: Tensor) -> Tensor:
    """Returns ``tensor`` with offset 0, because a compiled graph is specialized on the offsets."""
    found: Tensor = from_dlpack(tensor.detach())
    return found
