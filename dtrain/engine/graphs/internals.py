"""Gives a captured step what it needs of its engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtrain.engine.between_steps import BetweenSteps
from dtrain.engine.forward import ModelForward
from dtrain.engine.hooks import EngineHooks
from dtrain.engine.micro_batch import MicroBatches
from dtrain.engine.parts.order import EngineParts
from dtrain.engine.run_state import RunState
from dtrain.engine.vote.ballot import Ballot
from dtrain.engine.vote.losses import LossAccumulator
from dtrain.errors import UsageError


class Draw(NamedTuple):
    """A forward that draws random numbers: its micro-batch, and the number of earlier forwards of that."""

    micro_batch: int
    call: int


@dataclass(frozen=True)
class StepInternals:
    """Holds what a captured step needs of its engine; ``finalize`` finalizes the last step."""

    engine: EngineHooks
    batch: MicroBatches
    losses: LossAccumulator
    ballot: Ballot
    forward: ModelForward
    between: BetweenSteps
    run: RunState
    finalize: Callable[[], None]

    @property
    def parts(self) -> EngineParts:
        return self.between.parts

    @property
    def forward_under_way(self) -> Draw:
        """The forward that runs now."""
        return Draw(self.batch.current.number, self.batch.current.num_forwards - 1)

    @contextmanager
    def replaced(self, **changes: Any) -> Iterator[None]:
        """Inside, the engine has another ``work`` or ``scale``, its ballot another ``send``, its forward other RNGs."""
        owners: dict[str, Any] = {"work": self.engine, "scale": self.engine, "send": self.ballot, "rng": self.forward}
        before = {name: getattr(owners[name], name) for name in changes}
        try:
            for name, value in changes.items():
                setattr(owners[name], name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(owners[name], name, value)

    def looks_into(self, step: int) -> bool:
        """Whether something looks into ``step``, counted from 1, or computes what a graph does not hold."""
        parts = self.parts
        # an audit's check would come before the reductions of a replay, and after those of another rank's eager step
        is_observed = parts.forwards.keeps(step) or parts.samples.is_measuring or parts.audit.is_pending
        return is_observed or self.engine.loss_scale.is_calibrating


def refuse_missed(names: Collection[str]) -> None:
    """Raises ``UsageError`` if parameters called ``names`` have missed an update."""
    if names:
        raise UsageError(
            f"engine.graph=true: {len(names)} parameters have had no gradient in a step, such as "
            f"'{next(iter(names))}', and a graph updates all by the same numbers; freeze them, or set "
            f"missing_grad='zero' or engine.graph=false"
        )


def on_host(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns ``tensor`` in memory from which a copy to ``device`` is asynchronous: pinned, if it is on the host."""
    is_pageable = device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned()
    return tensor.pin_memory() if is_pageable else tensor
