"""The rule of stochastic gradient descent; its hyper-parameters are ``dtrain.config.optim.SGD``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtrain.config.optim import SGD
from dtrain.optim.formula import Formula
from dtrain.optim.formula_rule import FormulaRule
from dtrain.optim.rule import StateSpec, UpdateGroup, UpdateScalars


def _coefficients(constants: Sequence[Tensor], lr: Tensor, step: Tensor) -> Sequence[Tensor]:
    return lr, *constants


def _plain(
    master: Tensor, grad: Tensor, states: Sequence[Tensor], weight_decay: Tensor, coefficients: Sequence[Tensor]
) -> Sequence[Tensor]:
    return (master - coefficients[0] * (grad + weight_decay * master),)


def _momentum(
    master: Tensor, grad: Tensor, states: Sequence[Tensor], weight_decay: Tensor, coefficients: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Updates by Sutskever et al., 2013, in the form of ``torch.optim.SGD``: a changed lr leaves the buffer alone."""
    lr, factor = coefficients
    buffer = factor * states[0] + (grad + weight_decay * master)
    return master - lr * buffer, buffer


def _nesterov(
    master: Tensor, grad: Tensor, states: Sequence[Tensor], weight_decay: Tensor, coefficients: Sequence[Tensor]
) -> Sequence[Tensor]:
    lr, factor = coefficients
    grad = grad + weight_decay * master
    buffer = factor * states[0] + grad
    return master - lr * (grad + factor * buffer), buffer


_FORMULAS = {update: Formula(_coefficients, update) for update in (_plain, _momentum, _nesterov)}


class SGDRule(FormulaRule):
    """SGD: torch's fused kernel, or its formula compiled. Without momentum it has no state."""

    eager = "torch's fused kernel"

    def __init__(self, record: SGD) -> None:
        update = _nesterov if record.nesterov else _momentum if record.momentum else _plain
        states = (StateSpec("momentum_buffer"),) if record.momentum else ()
        super().__init__(record, _FORMULAS[update], [record.momentum] if record.momentum else [0.0], states)
        self._record = record

    def apply(self, group: UpdateGroup, grads: list[Tensor], scalars: UpdateScalars) -> None:
        """Updates the tensors in one call; the gradients are left divided."""
        lr, _, grad_divisor, found_inf = scalars.tensors
        scalars.rescale(grads)
        torch._fused_sgd_(
            group.masters,
            grads,
            *(group.states or ([],)),
            lr=lr,
            momentum=self._record.momentum,
            weight_decay=group.weight_decay,
            dampening=0.0,
            nesterov=self._record.nesterov,
            maximize=False,
            is_first_step=False,  # the first step finds a buffer of zeros, which gives the same
            grad_scale=grad_divisor,
            found_inf=found_inf,
        )
