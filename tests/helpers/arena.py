"""A small arena that one optimizer updates, and its references in double precision."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config.optim import SGD, Adam, AdamW, Lion, Optimizer
from dtrain.optim.flat import FlatUpdate
from dtrain.optim.rule import UpdateClass, UpdateScalars, UpdateSlice
from dtrain.optim.rules import rule_of
from dtrain.precision.remainder import RemainderPair, read, write
from dtrain.sharding.layout import CHUNK

DECAYED = UpdateClass(weight_decay=0.1)
PLAIN = UpdateClass()
SLOWER = UpdateClass(weight_decay=0.03, lr_factor=0.3)
CLASSES = (DECAYED, PLAIN, SLOWER)
CPU = torch.device("cpu")


def scalars(
    step: int, lr: float, grad_divisor: float = 1.0, found_inf: float = 0.0, device: torch.device = CPU
) -> UpdateScalars:
    return UpdateScalars(lr, step, torch.tensor(grad_divisor).to(device), torch.tensor(found_inf).to(device))


class Arena:
    """Contiguous masters, gradients, states and a replica of ``dtype``, with the same values on any device.

    ``record`` are hyper-parameters with ``compile`` decided; each chunk has its update class.
    """

    def __init__(
        self, record: Any, classes: Sequence[UpdateClass], seed: int = 0, dtype: Any = torch.bfloat16, device: Any = CPU
    ) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.rule = rule_of(record)
        self.classes = list(classes)
        self.master = torch.randn(len(classes) * CHUNK, generator=self._generator).to(device)
        self.main_grad = torch.zeros_like(self.master)
        self.states = {spec.name: spec.like(self.master) for spec in self.rule.states}
        self.replica = self.master.to(dtype, copy=True)

    def slices(self, cuts: Sequence[int] = ()) -> list[UpdateSlice]:
        """Returns the arena cut where the class changes and at every chunk number of ``cuts``."""
        changes = [i for i in range(1, len(self.classes)) if self.classes[i] != self.classes[i - 1]]
        bounds = sorted({0, len(self.classes), *changes, *cuts})
        parts = [slice(start * CHUNK, stop * CHUNK) for start, stop in itertools.pairwise(bounds)]
        return [self._slice(part) for part in parts]

    def _slice(self, part: slice) -> UpdateSlice:
        states, key = tuple(state[part] for state in self.states.values()), (7, part.start)
        own = self.classes[part.start // CHUNK]
        return UpdateSlice(own, key, self.master[part], self.main_grad[part], states, self.replica[part])

    def optimizer(self, cuts: Sequence[int] = ()) -> FlatUpdate:
        return FlatUpdate([self.rule], [self.slices(cuts)])

    def new_gradient(self) -> Tensor:
        self.main_grad.copy_(torch.randn(self.main_grad.numel(), generator=self._generator))  # drawn on the CPU
        return self.main_grad.clone()

    def steps(self, optimizer: FlatUpdate | None = None, number: int = 3, divisor: float = 7.0) -> dict[str, Tensor]:
        """Updates ``number`` times and returns copies of what an update writes."""
        optimizer = optimizer or self.optimizer()
        for step in range(1, number + 1):
            self.new_gradient()
            optimizer.update([0], scalars(step, 0.01 / step, divisor, device=self.master.device))
        return self.bits()

    def bits(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.written().items()}

    def written(self) -> dict[str, Tensor]:
        return {"master": self.master, **self.states, "replica": self.replica}

    def per_element(self, field: str) -> Tensor:
        values = [getattr(each, field) for each in self.classes]
        return torch.tensor(values, dtype=torch.float64).repeat_interleave(CHUNK)


def paired(parts: Sequence[UpdateSlice]) -> list[UpdateSlice]:
    """Returns the slices with the same masters as pairs, in new memory."""
    found = []
    for part in parts:
        halves = (torch.empty_like(part.main_grad, dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
        pair = RemainderPair(*halves)
        write(pair, read(part.master))
        found.append(replace(part, master=pair, replica=None))
    return found


def same_bits(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8)) for name in want)


class Reference:
    """``torch.optim`` in double precision, and for Lion the loop of its paper; a parameter for each chunk."""

    def __init__(self, arena: Arena, record: Optimizer) -> None:
        self.record, self.arena = record, arena
        self.chunks = [nn.Parameter(chunk.double()) for chunk in arena.master.split(CHUNK)]
        pairs = zip(self.chunks, arena.classes, strict=True)
        groups = [{"params": [chunk], "weight_decay": each.weight_decay} for chunk, each in pairs]
        self.optimizer = torch_optimizer(record, groups)

    def update(self, gradient: Tensor, lr: float) -> None:
        parts = zip(self.chunks, gradient.double().split(CHUNK), self.arena.classes, strict=True)
        for group, (chunk, grad, update_class) in zip(self.optimizer.param_groups, parts, strict=True):
            chunk.grad = grad
            group["lr"] = lr * update_class.lr_factor
        self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """Returns the masters and the states, by our names, which are torch's."""
        names = [spec.name for spec in self.arena.rule.states]
        states = {name: torch.cat([self.optimizer.state[chunk][name] for chunk in self.chunks]) for name in names}
        return {"master": torch.cat([chunk.detach() for chunk in self.chunks]), **states}


def torch_optimizer(record: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if isinstance(record, SGD):
        return torch.optim.SGD(groups, lr=1.0, momentum=record.momentum, nesterov=record.nesterov)
    if isinstance(record, Lion):
        return PaperLion(groups, {"lr": 1.0, "betas": record.betas})
    assert isinstance(record, AdamW)
    kind = torch.optim.Adam if isinstance(record, Adam) else torch.optim.AdamW
    return kind(groups, lr=1.0, betas=record.betas, eps=record.eps)


class PaperLion(torch.optim.Optimizer):
    """Chen et al., 2023, algorithm 2, line by line."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            for theta in group["params"]:
                if theta.grad is None:
                    continue
                state = self.state[theta]
                m = state.setdefault("exp_avg", torch.zeros_like(theta))
                c = beta1 * m + (1 - beta1) * theta.grad
                theta -= lr * (c.sign() + decay * theta)
                m.copy_(beta2 * m + (1 - beta2) * theta.grad)
