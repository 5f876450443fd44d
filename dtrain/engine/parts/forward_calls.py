"""The forwards of a step, kept so that a micro-batch can be run again: to explain a skip, or to compare it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dtrain.engine.outcome import StepOutcome
from dtrain.engine.parts.part import Forward, StepPart, StepUnderWay
from dtrain.engine.vote.decide import DecodedDecision

REPLAYED = 0
"""Number of the micro-batch that an audit or a shadow step computes again."""


class KeptForwards(StepPart):
    """Keeps references to the arguments of a step's forwards, if they may be run again, until the step is finalized.

    The caller must not overwrite them before the next step.

    Args:
        repeats: each tells whether it runs a step, counted from 1, again.
    """

    def __init__(self, *repeats: Callable[[int], bool]) -> None:
        self._repeats = repeats
        self._calls: dict[int, dict[int, list[Forward]]] = {}  # by step and micro-batch

    def keeps(self, step: int) -> bool:
        """Whether a part runs ``step``, counted from 1, again."""
        return any(repeats(step) for repeats in self._repeats)

    def before_forward(self, call: Forward) -> None:
        is_replayed = call.micro_batch == REPLAYED and self.keeps(call.step + 1)
        if not call.is_training or not (call.is_explained or is_replayed):
            return
        if call.begins_step:  # a step that ended the run is never finalized
            self._calls = {step: calls for step, calls in self._calls.items() if step == call.step - 1}
        of_step = self._calls.setdefault(call.step, {})
        if call.is_first:
            of_step[call.micro_batch] = []
        args, kwargs = pytree.tree_map(_without_graph, (call.args, call.kwargs))
        of_step.setdefault(call.micro_batch, []).append(replace(call, args=args, kwargs=kwargs))

    def of(self, step: int, micro_batch: int) -> Sequence[Forward]:
        """Returns the forwards of a micro-batch of attempted step ``step``, counted from 0."""
        return self._calls.get(step, {}).get(micro_batch, ())

    def finalized(self, outcome: StepOutcome, decision: DecodedDecision) -> None:
        self._calls.pop(decision.step, None)

    def end_step(self, step: StepUnderWay) -> None:
        if step.outcome is None:  # the next step has the same number
            self._calls.pop(step.number, None)


def _without_graph(value: Any) -> Any:
    """Detaches a tensor, so that no graph of another model is kept alive."""
    if isinstance(value, Tensor) and value.requires_grad:
        return value.detach().requires_grad_()
    return value


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Inside, the buffers are copies: the graph of a forward that awaits its backward may hold the originals."""
    buffers = [(module, name, b) for module in model.modules() for name, b in module._buffers.items() if b is not None]
    copies = {id(buffer): buffer.clone() for _, _, buffer in buffers}
    try:
        for module, name, buffer in buffers:
            module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
