"""An optimizer that dtrain does not ship, with one state: SGD with momentum, handed in below the public API."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from unittest import mock

import torch
from torch import Tensor

from dtrain.engine.interface import Engine
from dtrain.engine.request import EngineRequest
from dtrain.optim.rule import Rule, StateSpec, UpdateGroup, UpdateScalars
from dtrain.optim.rules import RULES


@dataclass(frozen=True)
class Momentum:
    """Hyper-parameters; the state is kept in BF16 if ``reduced``, and starts from ``init``."""

    lr: float = 0.1
    beta: float = 0.9
    weight_decay: float = 0.0
    reduced: bool = False
    init: float = 0.0


class MomentumRule(Rule):
    """Momentum as ``torch.optim.SGD`` has it, with decoupled weight decay."""

    def __init__(self, record: Momentum) -> None:
        self._record = record
        self.states = (StateSpec("momentum", torch.bfloat16 if record.reduced else torch.float32, record.init),)

    def apply(self, group: UpdateGroup, grads: list[Tensor], scalars: UpdateScalars) -> None:
        record = self._record
        decay = record.weight_decay if group.decayed else 0.0
        lr, _, divisor, found_inf = scalars.tensors
        (states,) = group.states
        for master, grad, state in zip(group.masters, grads, states, strict=True):
            momentum = record.beta * state.float() + grad / divisor
            moved = master - lr * (momentum + decay * master)
            state.copy_(torch.where(found_inf != 0, state, momentum.to(state.dtype)))
            master.copy_(torch.where(found_inf != 0, master, moved))


@contextmanager
def trained_by(record: Momentum, engine: str = "native") -> Iterator[None]:
    """Inside, ``dtrain.initialize`` builds ``engine`` with ``record``, behind its check of the public ``optimizer``."""
    module = import_module(f"dtrain.engine.{engine}")
    build = module.build

    def with_record(request: EngineRequest) -> Engine:
        made: Engine = build(
            dataclasses.replace(request, step=dataclasses.replace(request.step, optimizer=record))  # type: ignore[arg-type]
        )
        return made

    with mock.patch.dict(RULES, {Momentum: MomentumRule}), mock.patch.object(module, "build", with_record):
        yield
