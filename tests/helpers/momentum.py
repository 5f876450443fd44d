"""An optimizer that dtrain does not ship, with one state: SGD with momentum, handed in below the public API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from dtrain.config.optim import Optimizer
from dtrain.optim.rule import ElementwiseRule, StateSpec, UpdateGroup, UpdateScalars
from dtrain.optim.rules import RULES


@dataclass(frozen=True)
class Momentum(Optimizer):
    """Hyper-parameters; the state is kept in BF16 if ``reduced``, and starts from ``init``."""

    lr: float = 0.1
    beta: float = 0.9
    weight_decay: float = 0.0
    reduced: bool = False
    init: float = 0.0


class MomentumRule(ElementwiseRule):
    """Momentum as ``torch.optim.SGD`` has it, with decoupled weight decay."""

    def __init__(self, record: Momentum) -> None:
        self._record = record
        self.states = (StateSpec("momentum", torch.bfloat16 if record.reduced else torch.float32, record.init),)

    def apply(self, group: UpdateGroup, grads: list[Tensor], scalars: UpdateScalars) -> None:
        record = self._record
        lr, _, divisor, found_inf = scalars.tensors
        (states,) = group.states
        for master, grad, state in zip(group.masters, grads, states, strict=True):
            momentum = record.beta * state.float() + grad / divisor
            moved = master - lr * (momentum + group.weight_decay * master)
            state.copy_(torch.where(found_inf != 0, state, momentum.to(state.dtype)))
            master.copy_(torch.where(found_inf != 0, master, moved))


@contextmanager
def trained_by() -> Iterator[None]:
    """Inside, ``dtrain.initialize`` takes a ``Momentum``."""
    with mock.patch.dict(RULES, {Momentum: MomentumRule}):
        yield
