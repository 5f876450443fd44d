"""AdamW in plain tensor code, compiled into one pass over memory.

The pass reads main grad, master and both moments, and writes master, moments and replica: 30 bytes an element with a
BF16 replica. ``torch.compile`` makes it a fused C++ loop on a CPU; on a GPU :mod:`dtrain.optim.tiled` has its place.
Everything that may change is a tensor, so there is one graph for each kind of replica and one for the coefficients, and
none per size, step or hyper-parameter. No result depends on an element's position, so any cut and any sharding give the
same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from dtrain.config.optim import AdamW
from dtrain.distributed.logging import logger
from dtrain.errors import ConfigError
from dtrain.optim.rule import UpdateScalars, UpdateSlice


def _constants(betas: tuple[float, float], eps: float, device: torch.device) -> Tensor:
    """Returns FP32 [6], each computed in double and rounded once: both log(beta), 1 - beta1, beta2, 1 - beta2, eps."""
    beta1, beta2 = betas
    logs = [math.log(beta) if beta else -math.inf for beta in betas]
    return torch.tensor([*logs, 1 - beta1, beta2, 1 - beta2, eps], dtype=torch.float32, device=device)


def _coefficients(constants: Tensor, lr: Tensor, step: Tensor, grad_divisor: Tensor, found_inf: Tensor) -> Tensor:
    """Returns FP32 [5], the coefficients that all elements of one update share."""
    log_beta1, log_beta2, *_ = constants.unbind()
    # 1 - beta^step without the cancellation of the difference
    correction1, correction2 = -torch.expm1(step * log_beta1), -torch.expm1(step * log_beta2)
    return torch.stack((grad_divisor, lr, lr / correction1, correction2.sqrt(), found_inf))


def _update(tensors: tuple[Tensor, ...], constants: Tensor, weight_decay: Tensor, coefficients: Tensor) -> None:
    """Updates by Loshchilov and Hutter, 2019, algorithm 2; the states keep their bits if ``found_inf`` is set.

    ``tensors`` are master, main grad and both moments, then the replica if it is cast here.
    """
    master, main_grad, exp_avg, exp_avg_sq, *replica = tensors
    _, _, one_minus_beta1, beta2, one_minus_beta2, eps = constants.unbind()
    grad_divisor, lr, step_size, root_correction, found_inf = coefficients.unbind()
    skip = found_inf != 0
    grad = main_grad / grad_divisor
    first = exp_avg + (grad - exp_avg) * one_minus_beta1
    second = exp_avg_sq * beta2 + grad * grad * one_minus_beta2
    # one difference: 1 - lr * weight_decay would round a small decay away
    moved = master - (lr * weight_decay * master + step_size * (first / (second.sqrt() / root_correction + eps)))
    kept = torch.where(skip, master, moved)
    exp_avg.copy_(torch.where(skip, exp_avg, first))
    exp_avg_sq.copy_(torch.where(skip, exp_avg_sq, second))
    master.copy_(kept)
    if replica:
        replica[0].copy_(kept)


def _rebased(part: UpdateSlice) -> tuple[Tensor, ...]:
    """Returns the tensors of ``part`` with offset 0, because a compiled graph is specialized on the offsets."""
    tensors = (part.master, part.main_grad, *part.states, part.replica)
    return tuple(from_dlpack(tensor.detach()) for tensor in tensors if tensor is not None)


@cache  # engines of one process share the graphs
def _compiled() -> tuple[Callable[..., Tensor], Callable[..., None]]:
    return (
        torch.compile(_coefficients, dynamic=True, fullgraph=True),
        torch.compile(_update, dynamic=True, fullgraph=True),
    )


class CompiledAdamW:
    """The compiled update of the segments of an arena, built before the first step.

    Args:
        record: hyper-parameters.
        segments: the slices of each segment, of any update classes.

    Raises:
        ConfigError: the compiler failed.
    """

    def __init__(self, record: AdamW, segments: Sequence[Sequence[UpdateSlice]]) -> None:
        self._segments = [[(_rebased(part), part.update_class) for part in segment] for segment in segments]
        self._scalars: UpdateScalars | None = None
        self._coefficients: dict[float, Tensor] = {}
        slices = [(tensors, update_class) for segment in self._segments for tensors, update_class in segment]
        if slices:  # a rank may have no segments
            device = slices[0][0][0].device
            self._constants = _constants(record.betas, record.eps, device)
            self._decays = {
                decay: torch.tensor(decay, dtype=torch.float32, device=device)
                for decay in {update_class.weight_decay for _, update_class in slices}
            }
            self._build([tensors for tensors, _ in slices])

    def update(self, numbers: Sequence[int], scalars: UpdateScalars) -> None:
        """Updates the segments ``numbers``; the main grads are left as they were."""
        coefficients, update = _compiled()
        if scalars is not self._scalars:  # the first segments of this update
            self._scalars, self._coefficients = scalars, {}
        for tensors, update_class in (slices for number in numbers for slices in self._segments[number]):
            factor = update_class.lr_factor
            if factor not in self._coefficients:
                self._coefficients[factor] = coefficients(self._constants, *scalars.scaled(factor).tensors)
            update(tensors, self._constants, self._decays[update_class.weight_decay], self._coefficients[factor])

    @torch.no_grad()
    def _build(self, slices: Sequence[tuple[Tensor, ...]]) -> None:
        """Compiles for each kind of replica in ``slices`` by a skipped update, which changes no bit."""
        start = time.perf_counter()
        device = self._constants.device
        coefficients, update = _compiled()
        # four separate tensors, because a graph is specialized on which of its inputs are the same one
        skipped_by = [torch.ones((), dtype=torch.float32, device=device) for _ in range(4)]
        # the largest of each kind, because the number of threads of a loop is decided for the first size
        by_size = sorted(slices, key=lambda tensors: tensors[0].numel())
        largest = {tuple(tensor.dtype for tensor in tensors): tensors for tensors in by_size}
        try:
            skipped = coefficients(self._constants, *skipped_by)
            for tensors in largest.values():
                update(tensors, self._constants, next(iter(self._decays.values())), skipped)
        except RuntimeError as error:  # all failures of the compiler are
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"the update cannot be compiled on {device} ({type(error).__name__}: {reason}); install a C++ "
                f"compiler, and Triton on a GPU, or set optim.compile=false, AdamW(compile=False)"
            ) from error
        logger.info("optimizer: AdamW compiled in %.1f s", time.perf_counter() - start)
