"""Lion's rule; its hyper-parameters are ``dtrain.config.optim.Lion``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dtrain.config.optim import Lion
from dtrain.optim.formula import Formula
from dtrain.optim.formula_rule import FormulaRule
from dtrain.optim.rule import StateSpec


def _coefficients(constants: Sequence[Tensor], lr: Tensor, step: Tensor) -> Sequence[Tensor]:
    return lr, *constants


def _lion(
    master: Tensor, grad: Tensor, states: Sequence[Tensor], weight_decay: Tensor, coefficients: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Updates by Chen et al., 2023, algorithm 2."""
    (exp_avg,) = states
    lr, beta1, one_minus_beta1, beta2, one_minus_beta2 = coefficients
    direction = (exp_avg * beta1 + grad * one_minus_beta1).sign()
    return master - lr * (direction + weight_decay * master), exp_avg * beta2 + grad * one_minus_beta2


_FORMULA = Formula(_coefficients, _lion)


class LionRule(FormulaRule):
    """Lion, by its formula."""

    def __init__(self, record: Lion) -> None:
        beta1, beta2 = record.betas
        super().__init__(record, _FORMULA, [beta1, 1 - beta1, beta2, 1 - beta2], (StateSpec("exp_avg"),))
