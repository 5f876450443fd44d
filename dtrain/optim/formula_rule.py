"""Optimizers whose update is a formula."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dtrain.optim.compiled import CompiledUpdate
from dtrain.optim.formula import MAX_BLOCK, Formula
from dtrain.optim.rule import ElementwiseRule, SegmentKernel, StateSpec, UpdateGroup, UpdateScalars, UpdateSlice
from dtrain.optim.stochastic import step_words, stream_start
from dtrain.precision.fake import block_starts

_BLOCK = {"cpu": 64 * 1024}
"""Elements of one eager evaluation, whose temporaries then stay in a CPU's cache."""


class FormulaRule(ElementwiseRule):
    """An optimizer by a formula; a subclass may have a faster eager update.

    Args:
        record: hyper-parameters, with ``compile`` decided (see ``dtrain.optim.rules.on_device``).
        formula: the update.
        constants: what the formula is given, computed in double precision, rounded to FP32 once.
        states: its states.
    """

    eager = "tensor code"
    """Name of the code that ``apply`` runs."""

    def __init__(
        self, record: Any, formula: Formula, constants: Sequence[float], states: tuple[StateSpec, ...]
    ) -> None:
        if not isinstance(record.compile, bool):
            raise ValueError(f"{type(record).__name__}.compile is 'auto'; call on_device first")
        self.is_compiled = record.compile
        self.states = states
        self.name = type(record).__name__
        self.formula = formula
        self.is_rounded = any(spec.dtype == torch.bfloat16 for spec in states)
        self._values = list(constants)
        self._constants: dict[torch.device, Tensor] = {}
        self._shared: tuple[UpdateScalars | None, Tensor] = None, torch.empty(0)
        self.description = f"{self.name} compiled in {{seconds:.1f}} s"
        if not self.is_compiled:
            self.description = f"{self.name} by {self.eager}; optim.compile=true would compile it, which takes seconds"

    def constants(self, device: torch.device) -> Tensor:
        """Returns FP32 [number of constants]."""
        if device not in self._constants:
            # filled in on the device: a copy from pageable host memory would wait
            self._constants[device] = torch.stack(
                [torch.full((), value, dtype=torch.float32, device=device) for value in self._values]
            )
        return self._constants[device]

    def apply(self, group: UpdateGroup, grads: list[Tensor], scalars: UpdateScalars) -> None:
        """Updates the tensors one by one, eagerly."""
        if not group.masters:
            return
        device = group.masters[0].device
        decides_on_host = _decides_on_host(device)
        if decides_on_host and _is_skipped(scalars):
            return
        weight_decay = torch.full((), group.weight_decay, dtype=torch.float32, device=device)
        if self._shared[0] is not scalars:
            self._shared = scalars, self.formula.shared(self.constants(device), *scalars.tensors, scalars.grad_factor)
        shared = self._shared[1]
        words = step_words(scalars.step, device) if self.is_rounded else None
        for (key, index), *whole in zip(group.origins, group.masters, grads, *group.states, strict=True):
            for start, tensors in _blocks(whole, _BLOCK.get(device.type, MAX_BLOCK)):
                noise = None if words is None else (stream_start(key, index + start, device), *words)
                master, _, *states = tensors
                new = self.formula.updated(tensors, weight_decay, shared, noise)
                for old, value in zip((master, *states), new, strict=True):
                    old.copy_(value if decides_on_host else torch.where(shared[1] != 0, old, value))

    def segment_kernel(self, segments: Sequence[Sequence[UpdateSlice]]) -> SegmentKernel | None:
        """Returns the compiled update of ``segments``, if one is asked for."""
        if not self.is_compiled:
            return None
        return CompiledUpdate(self.name, self.formula, self.constants, segments, is_rounded=self.is_rounded)


def _decides_on_host(device: torch.device) -> bool:
    """Whether the host knows if an update is skipped; other devices decide it themselves, without the host."""
    return device.type == "cpu"


def _is_skipped(scalars: UpdateScalars) -> bool:
    return bool(scalars.found_inf != 0)


def _blocks(tensors: Sequence[Tensor], size: int) -> Iterator[tuple[int, list[Tensor]]]:
    """Yields (index of the first element, parts of the tensors) of ``size`` elements, or the tensors if strided."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        yield 0, list(tensors)
        return
    flat = [tensor.view(-1) for tensor in tensors]
    for start in block_starts(flat[0], size):
        yield start, [tensor[start : start + size] for tensor in flat]
