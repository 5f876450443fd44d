"""The FP32 oracle: one process, plain torch, no sharding, no low precision, nothing imported from dtrain.

It trains a deep copy of a model on the micro-batches that all ranks of a distributed run see together, in the order of
their global index (micro-batch x world size + rank), as slowly and as obviously as it can be written:

    gradient = sum(w x gradient of loss) / sum(w)
    clipped  = gradient x min(1, max_grad_norm / (norm + 1e-6))          as torch.nn.utils.clip_grad_norm_
    master   = AdamW(master, clipped), Loshchilov and Hutter 2019, algorithm 2, as torch.optim.AdamW; a parameter of
               which no micro-batch has a gradient is left alone
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class AdamWSettings:
    """Hyper-parameters of the update; parameters of at most one dimension (norms, biases) are never decayed."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclass(frozen=True)
class OracleStep:
    """Result of one step; norm and gradients are those before clipping."""

    applied: bool
    reason: str | None  # None if applied, else the first that holds of "empty", "nonfinite_loss", "overflow"
    loss: float  # weighted mean over the micro-batches; NaN if the weights sum to 0
    grad_norm: float
    gradients: dict[str, Tensor]  # empty if the weights sum to 0


def extract_loss(output: Any) -> Tensor:
    """The loss in what a model returned: the tensor itself, ``output["loss"]`` or ``output.loss``."""
    if isinstance(output, Tensor):
        return output
    return output["loss"] if isinstance(output, Mapping) else output.loss  # type: ignore[no-any-return]


def loss_of_kwargs(model: Callable[..., Any], micro_batch: Mapping[str, Any]) -> Tensor:
    """The loss of a model that takes its micro-batch as keyword arguments and computes the loss itself."""
    return extract_loss(model(**micro_batch))


class Oracle:
    """Trains a deep copy of ``model``.

    Args:
        model: left as it is; its frozen parameters stay frozen, its training mode stays what it is.
        optimizer: hyper-parameters of AdamW.
        schedule: factor on the learning rate, as a function of the steps applied so far (0 for the first).
        max_grad_norm: clips the global L2 norm; None does not clip.
        loss: ``loss(model, micro_batch)`` runs the forward and returns the scalar loss.
        before_forward: called with (attempted step, global index) before each forward, to seed its random numbers.
        dtype: of everything that is floating point, micro-batches too; float64 shows the error of FP32 itself.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: AdamWSettings = AdamWSettings(),
        schedule: Callable[[int], float] = lambda applied_steps: 1.0,
        max_grad_norm: float | None = None,
        loss: Callable[[Callable[..., Any], Any], Tensor] = loss_of_kwargs,
        before_forward: Callable[[int, int], None] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = copy.deepcopy(model).to(dtype)
        self.attempted_steps = 0
        self.applied_steps = 0
        self._optimizer = optimizer
        self._schedule = schedule
        self._max_grad_norm = max_grad_norm
        self._loss = loss
        self._before_forward = before_forward
        self._dtype = dtype
        self._parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._exp_avg = {name: torch.zeros_like(p.detach()) for name, p in self._parameters.items()}
        self._exp_avg_sq = {name: torch.zeros_like(p.detach()) for name, p in self._parameters.items()}
        self._num_updates = dict.fromkeys(self._parameters, 0)

    def masters(self) -> dict[str, Tensor]:
        """A copy of every parameter by name, frozen ones too; tied ones once, under their first name."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def step(self, micro_batches: Iterable[tuple[Any, float | Tensor]]) -> OracleStep:
        """Takes one step on the (micro-batch, weight) pairs of all ranks, in the order of their global index.

        A skipped step leaves parameters, moments and ``applied_steps`` as they were; buffers are the forward's own.
        """
        losses, weights = [], []
        gradients = {name: torch.zeros_like(p.detach()) for name, p in self._parameters.items()}
        received = set()
        for index, (micro_batch, weight) in enumerate(micro_batches):
            if self._before_forward is not None:
                self._before_forward(self.attempted_steps, index)
            loss = self._loss(self.model, _cast(micro_batch, self._dtype))
            own = torch.autograd.grad(loss, list(self._parameters.values()), allow_unused=True)
            losses.append(loss.item())
            weights.append(float(weight))
            for (name, total), gradient in zip(gradients.items(), own, strict=True):
                if gradient is not None:
                    received.add(name)
                    total += weights[-1] * gradient
        self.attempted_steps += 1

        if sum(weights) == 0:
            return OracleStep(applied=False, reason="empty", loss=math.nan, grad_norm=0.0, gradients={})
        gradients = {name: total / sum(weights) for name, total in gradients.items()}
        mean_loss = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
        norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))

        reason = None
        if not all(math.isfinite(loss) for loss in losses):
            reason = "nonfinite_loss"
        elif not all(g.isfinite().all() for g in gradients.values()):
            reason = "overflow"
        else:
            self._update({name: gradients[name] for name in received}, norm)
        return OracleStep(reason is None, reason, mean_loss, norm, gradients)

    @torch.no_grad()
    def _update(self, gradients: dict[str, Tensor], norm: float) -> None:
        lr = self._optimizer.lr * self._schedule(self.applied_steps)
        beta1, beta2 = self._optimizer.betas
        self.applied_steps += 1
        clip = 1.0 if self._max_grad_norm is None else min(1.0, self._max_grad_norm / (norm + 1e-6))
        for name, gradient in gradients.items():
            p, g, m, v = self._parameters[name], gradient * clip, self._exp_avg[name], self._exp_avg_sq[name]
            self._num_updates[name] += 1
            decay = self._optimizer.weight_decay if p.ndim > 1 else 0.0
            p.copy_(p * (1 - lr * decay))
            m.copy_(beta1 * m + (1 - beta1) * g)
            v.copy_(beta2 * v + (1 - beta2) * g * g)
            m_hat = m / (1 - beta1 ** self._num_updates[name])
            v_hat = v / (1 - beta2 ** self._num_updates[name])
            p.copy_(p - lr * m_hat / (v_hat.sqrt() + self._optimizer.eps))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_cast(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


Tensors = Tensor | Mapping[str, Tensor]


def _pairs(got: Tensors, want: Tensors) -> list[tuple[str, Tensor, Tensor]]:
    got = {"tensor": got} if isinstance(got, Tensor) else got
    want = {"tensor": want} if isinstance(want, Tensor) else want
    missing, unexpected = sorted(set(want) - set(got)), sorted(set(got) - set(want))
    assert missing == unexpected, f"missing: {missing}, unexpected: {unexpected}"
    for name in want:
        shape, expected = tuple(got[name].shape), tuple(want[name].shape)
        assert shape == expected, f"{name}: got shape {shape}, want {expected}"
        assert want[name].isfinite().all(), f"{name}: the reference itself is not finite"
    return [(name, got[name].detach().cpu().double(), want[name].detach().cpu().double()) for name in want]


def assert_close_to_largest(got: Tensors, want: Tensors, rtol: float) -> None:
    """Asserts that no element is off by more than ``rtol`` x the largest magnitude of its tensor in ``want``.

    Takes two tensors, or two mappings with the same names; a tensor of zeros must be met exactly.
    """
    for name, g, w in _pairs(got, want):
        if w.numel() == 0:
            continue
        error = (g - w).abs().flatten()  # argmax takes a NaN for the largest
        worst = int(error.argmax())
        largest = w.abs().max().item()
        assert error[worst] <= rtol * largest, (
            f"{name}{[int(i) for i in torch.unravel_index(torch.tensor(worst), w.shape)]}: "
            f"got {g.flatten()[worst]:.9g}, want {w.flatten()[worst]:.9g}; "
            f"off by {error[worst]:.3g}, allowed {rtol:g} x {largest:.9g} (the largest magnitude of the tensor)"
        )


def normwise_error(got: Tensors, want: Tensors) -> float:
    """The L2 norm of ``got - want`` over that of ``want``; mappings count as one long vector."""
    pairs = _pairs(got, want)
    difference = math.sqrt(sum((g - w).square().sum().item() for _, g, w in pairs))
    size = math.sqrt(sum(w.square().sum().item() for _, _, w in pairs))
    if difference == 0:
        return 0.0
    return difference / size if size > 0 else math.inf
