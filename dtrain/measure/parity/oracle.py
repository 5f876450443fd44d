"""Plain PyTorch training in one process, the reference for all engines. It shares no code with them.

In FP32 it is the oracle. In the precision of the engines, with its weights perturbed by one unit in the last place, it
is the noise baseline: the deviation from the oracle that rounding alone causes. For FP8 it has its own products, with
other scales than the engines'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.config.optim import OptimConfig

_FIRST_SCALE = 2.0**16
_IGNORED = -100  # a target that does not count in its model's mean
_SMALLEST = 1e-30  # smallest maximum that a scale is computed from: all zeros have none


class PlainTraining:
    """Trains a model in FP32 weights with ``torch.optim.AdamW``; a step is the whole global batch.

    Args:
        model: trained in place; values in FP32.
        optim: hyper-parameters. Parameters with fewer than two dimensions are not decayed.
        seed_forward: called with (attempted step, index of the micro-batch) before each forward.
        compute_dtype: dtype of ``torch.autocast`` around each forward; None: FP32 throughout. Under FP16 the loss is
            scaled, and a step whose gradients overflow is repeated with half the scale.
        perturbation: relative size of a uniform random change of the weights during each step's forwards; the update
            applies to the unperturbed weights.
        float8_linears: names of the Linears whose three products round their operands to FP8.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: OptimConfig,
        seed_forward: Callable[[int, int], object],
        *,
        compute_dtype: torch.dtype | None = None,
        perturbation: float = 0.0,
        float8_linears: Collection[str] = (),
    ) -> None:
        for name in float8_linears:
            linear: Any = model.get_submodule(name)
            linear.forward = partial(_linear_in_float8, linear, compute_dtype or torch.float32)
        self.applied_steps = 0
        self._attempted_steps = 0
        self._model = model
        self._seed_forward = seed_forward
        self._compute_dtype = compute_dtype
        self._perturbation = perturbation
        self._max_grad_norm = float("inf") if optim.max_grad_norm is None else optim.max_grad_norm
        self._scale = _FIRST_SCALE if compute_dtype == torch.float16 else 1.0
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.device = next(iter(self._parameters.values())).device
        self._generator = torch.Generator(self.device).manual_seed(0)
        decayed = [p for p in self._parameters.values() if p.ndim > 1]
        others = [p for p in self._parameters.values() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=optim.lr, betas=optim.betas, eps=optim.eps
        )

    def weights(self) -> dict[str, Tensor]:
        """Returns a copy of every trained parameter on the CPU; tied ones once, under their first name."""
        return {name: p.detach().to("cpu", copy=True) for name, p in self._parameters.items()}

    def step(
        self, micro_batches: Sequence[Mapping[str, Tensor]], lr: float, *, skip: bool = False
    ) -> tuple[float, float]:
        """Trains one step on the mean loss of all targets that count; returns loss and gradient norm before clipping.

        Args:
            micro_batches: keyword arguments of the model, on its device, in their global order.
            lr: learning rate of this step.
            skip: keep weights, moments and ``applied_steps`` unchanged.
        """
        loss = self._compute_gradients(micro_batches)
        while self._scale > 1.0 and not all(bool(grad.isfinite().all()) for grad in self._gradients()):
            self._scale /= 2
            loss = self._compute_gradients(micro_batches)
        for grad in self._gradients():
            grad /= self._scale
        norm = float(nn.utils.clip_grad_norm_(self._trained(), self._max_grad_norm))
        if not skip:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self.applied_steps += 1
        self._attempted_steps += 1
        return loss, norm

    def _compute_gradients(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> float:
        """Writes the scaled gradient of the mean loss to ``.grad``; returns that loss."""
        total, counts = 0.0, [_num_targets(micro_batch) for micro_batch in micro_batches]
        for p in self._trained():
            p.grad = None
        with self._perturbed_weights():
            for index, micro_batch in enumerate(micro_batches):
                self._seed_forward(self._attempted_steps, index)
                with torch.autocast(
                    self.device.type, dtype=self._compute_dtype, enabled=self._compute_dtype is not None
                ):
                    loss = _extract_loss(self._model(**micro_batch))
                share = counts[index] / sum(counts) if any(counts) else math.nan
                (loss.float() * self._scale * share).backward()
                total += loss.item() * share
        return total

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._trained() if p.grad is not None]

    def _trained(self) -> list[nn.Parameter]:
        return list(self._parameters.values())

    @contextmanager
    def _perturbed_weights(self) -> Iterator[None]:
        originals = [p.detach().clone() for p in self._trained()]
        if self._perturbation:
            for p in self._trained():
                noise = torch.rand(p.shape, generator=self._generator, device=self.device)
                p.data.mul_(1 + self._perturbation * (2 * noise - 1))
        yield
        for p, value in zip(self._trained(), originals, strict=True):
            p.data.copy_(value)


def _num_targets(micro_batch: Mapping[str, Tensor]) -> int:
    """Returns how many targets the model's loss is the mean of; 1 if the micro-batch has none."""
    targets = micro_batch.get("targets")
    if targets is None:
        return 1
    return len(targets) if targets.is_floating_point() else int((targets != _IGNORED).sum())


def _extract_loss(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output.loss
    return loss


def _linear_in_float8(linear: nn.Linear, dtype: torch.dtype, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        y: Tensor = _Float8Product.apply(x, linear.weight)
        return y.to(dtype) if linear.bias is None else y.to(dtype) + linear.bias.to(dtype)


class _Float8Product(torch.autograd.Function):
    """``x`` [..., K] @ ``weight`` [N, K]^T in FP32; all three products round their operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        operands = _rounded(x, torch.float8_e4m3fn), _rounded(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(*operands)
        ctx.dtypes = x.dtype, weight.dtype
        return F.linear(*operands)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rounded = _rounded(gradient, torch.float8_e5m2)
        weight_grad = rounded.flatten(0, -2).t() @ x.flatten(0, -2)
        return (rounded @ weight).to(ctx.dtypes[0]), weight_grad.to(ctx.dtypes[1])


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``x`` in FP32, rounded to ``dtype`` with its maximum scaled to the largest number of ``dtype``."""
    scale = torch.finfo(dtype).max / x.float().abs().amax().clamp(min=_SMALLEST)
    return (x.float() * scale).to(dtype).float() / scale
