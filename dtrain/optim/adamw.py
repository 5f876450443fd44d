"""AdamW's and Adam's rules; their hyper-parameters are records of ``dtrain.config.optim``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dtrain.config.optim import AdamW, AdamWBF16
from dtrain.optim.formula import Formula
from dtrain.optim.formula_rule import FormulaRule
from dtrain.optim.rule import SegmentKernel, StateSpec, UpdateGroup, UpdateScalars, UpdateSlice

_MOMENTS = (StateSpec("exp_avg"), StateSpec("exp_avg_sq"))


def _constants(record: AdamW) -> list[float]:
    """Returns both log(beta), 1 - beta1, beta2, 1 - beta2, eps."""
    beta1, beta2 = record.betas
    logs = [math.log(beta) if beta else -math.inf for beta in record.betas]
    return [*logs, 1 - beta1, beta2, 1 - beta2, record.eps]


def _coefficients(constants: Sequence[Tensor], lr: Tensor, step: Tensor) -> Sequence[Tensor]:
    log_beta1, log_beta2, *others = constants
    # 1 - beta^step without the cancellation of the difference
    correction1, correction2 = -torch.expm1(step * log_beta1), -torch.expm1(step * log_beta2)
    return lr, lr / correction1, correction2.sqrt(), *others


def _direction(grad: Tensor, states: Sequence[Tensor], coefficients: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the change of the master and both new moments."""
    exp_avg, exp_avg_sq = states
    _, step_size, root_correction, one_minus_beta1, beta2, one_minus_beta2, eps = coefficients
    first = exp_avg + (grad - exp_avg) * one_minus_beta1
    second = exp_avg_sq * beta2 + grad * grad * one_minus_beta2
    return step_size * (first / (second.sqrt() / root_correction + eps)), first, second


def _adamw(
    master: Tensor, grad: Tensor, states: Sequence[Tensor], weight_decay: Tensor, coefficients: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Updates by Loshchilov and Hutter, 2019, algorithm 2."""
    change, first, second = _direction(grad, states, coefficients)
    # one difference: 1 - lr * weight_decay would round a small decay away
    return master - (coefficients[0] * weight_decay * master + change), first, second


def _adam(
    master: Tensor, grad: Tensor, states: Sequence[Tensor], weight_decay: Tensor, coefficients: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Updates by Kingma and Ba, 2015, algorithm 1, with the weight decay added to the gradient."""
    change, first, second = _direction(grad + weight_decay * master, states, coefficients)
    return master - change, first, second


class _Fused(FormulaRule):
    """A rule whose eager update is one of torch's fused kernels; compiled, it is its formula."""

    eager = "torch's fused kernel"
    _formula: Formula
    _kernel: Callable[..., None]

    def __init__(self, record: AdamW) -> None:
        super().__init__(record, self._formula, _constants(record), _MOMENTS)
        self._record = record

    def apply(self, group: UpdateGroup, grads: list[Tensor], scalars: UpdateScalars) -> None:
        """Updates the tensors in one call; the gradients are left divided."""
        exp_avgs, exp_avg_sqs = group.states
        lr, step, grad_divisor, found_inf = scalars.tensors
        scalars.rescale(grads)
        record = self._record
        self._kernel(
            group.masters,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [step] * len(group.masters),  # read only: the kernel leaves counting to its caller
            lr=lr,
            beta1=record.betas[0],
            beta2=record.betas[1],
            weight_decay=group.weight_decay,
            eps=record.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_divisor,
            found_inf=found_inf,
        )


class AdamWRule(_Fused):
    """AdamW: torch's fused kernel, its formula compiled for a CPU, or a Triton kernel."""

    _formula = Formula(_coefficients, _adamw)
    _kernel = staticmethod(torch._fused_adamw_)

    def segment_kernel(self, segments: Sequence[Sequence[UpdateSlice]]) -> SegmentKernel | None:
        """Returns the compiled kernel for the device of ``segments``, if one is asked for."""
        if self.is_compiled and any(part.master.device.type == "cuda" for segment in segments for part in segment):
            from dtrain.optim.tiled import TiledAdamW  # it imports Triton, which a CPU build of torch does not have

            return TiledAdamW(self._record, segments)
        return super().segment_kernel(segments)


class AdamRule(_Fused):
    """Adam: torch's fused kernel, or its formula compiled."""

    _formula = Formula(_coefficients, _adam)
    _kernel = staticmethod(torch._fused_adam_)


class AdamWBF16Rule(FormulaRule):
    """AdamW's formula with moments in BF16; the master moves by the moments before they are rounded."""

    def __init__(self, record: AdamWBF16) -> None:
        states = tuple(StateSpec(spec.name, torch.bfloat16) for spec in _MOMENTS)
        super().__init__(record, AdamWRule._formula, _constants(record), states)
