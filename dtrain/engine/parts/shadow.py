"""Computes one micro-batch in BF16 too, forward and backward, and compares loss and gradients with those of FP8."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.distributed.consensus import on_every_rank
from dtrain.distributed.logging import logger
from dtrain.engine.blocks.compiled import CompiledBlocks
from dtrain.engine.forward import ModelForward
from dtrain.engine.parts.forward_calls import REPLAYED, KeptForwards
from dtrain.engine.parts.part import StepPart, StepUnderWay
from dtrain.engine.parts.replay import run_again
from dtrain.engine.vote.losses import LossAccumulator
from dtrain.errors import ConfigError
from dtrain.parameters.model_states import ModelStates
from dtrain.precision.float8.linear import products_in_bf16

LOWEST_COSINE = 0.9
"""Cosine of the gradients of FP8 and BF16 below which a warning says so."""


@dataclass(frozen=True)
class Float8Gap:
    """What FP8 has changed in the first micro-batches of a step, over all ranks and parameters; NaN if not finite.

    Gradients are compared as they leave each rank's backward, times the micro-batch's weight. In their sum over ranks
    and micro-batches errors cancel in part, so the gradient of a step of several is nearer to that of BF16.

    Attributes:
        step: counted from 1.
        loss: (loss in FP8 - loss in BF16) / |loss in BF16|.
        cosine: of the angle between the two gradients.
        norm_ratio: norm of the gradient in FP8 over that in BF16.
    """

    step: int
    loss: float
    cosine: float
    norm_ratio: float


class ShadowStep(StepPart):
    """Runs the first micro-batch of every N-th step again before the update, in FP8 and in BF16, with hooks for both.

    Nothing of it stays, as of a replay. In BF16 each FP8 product takes what the FP8 copy of its weight represents,
    which BF16 holds exactly, so the gap is that of the casts of inputs and gradients. Until the end of the step it
    takes one gradient of each whole parameter, in its compute dtype, and FP8 weights in BF16: on every rank.

    Attributes:
        every: steps from one to the next.
        latest: the last comparison.
    """

    def __init__(
        self,
        forward: ModelForward,
        states: ModelStates,
        calls: KeptForwards,
        losses: LossAccumulator,
        compiled: CompiledBlocks | None,
    ) -> None:
        self.every = states.contract.shadow_every
        self.latest: Float8Gap | None = None
        self._forward, self._states, self._calls, self._losses = forward, states, calls, losses
        self._compiled = compiled
        self._has_warned = False

    def before_update(self, step: StepUnderWay) -> None:
        """Compares, if it is due; all ranks call together, because forwards may communicate."""
        if (step.number + 1) % self.every:
            return
        comm = self._forward.comm
        rows = on_every_rank(
            comm, "precision.float8.shadow_every: computing a micro-batch again", lambda: self._sums(step), ConfigError
        )
        float8, bf16, weight, dot, float8_square, bf16_square = torch.tensor(rows, dtype=torch.float64).sum(0)
        if not weight:  # dummies only
            return
        norms = (float8_square.sqrt(), bf16_square.sqrt())
        gap = (float8 - bf16) / bf16.abs(), dot / (norms[0] * norms[1]), norms[0] / norms[1]
        self.latest = Float8Gap(step.number + 1, *map(float, gap))
        if self.latest.cosine < LOWEST_COSINE and not self._has_warned:
            self._has_warned = True
            if comm.rank == 0:
                logger.warning(
                    f"step {step.number + 1}: the gradients in FP8 and in BF16 have a cosine of "
                    f"{self.latest.cosine:.3f}, below {LOWEST_COSINE}, so FP8 steers this training; take a finer "
                    f"precision.float8.recipe, keep modules out of FP8 by precision.rules (dtrain formats histogram "
                    f"shows which lose most), or finish the run with precision=bf16"
                )

    def _sums(self, step: StepUnderWay) -> list[float]:
        """Returns this rank's addends: both losses, the weight, and the products of its gradients."""
        calls, (values, numbers) = self._calls.of(step.number, REPLAYED), self._losses.values()
        if not calls or REPLAYED not in numbers:
            return [0.0] * 6
        weight = values[1, numbers.index(REPLAYED)].double()
        device = self._forward.comm.device
        float8 = _Pass(device)
        bf16 = _Pass(device, float8)
        try:
            with nullcontext() if self._compiled is None else self._compiled.eager():
                run_again(self._forward, self._states, calls, step.loss_scale, float8.add)
                with products_in_bf16():
                    run_again(self._forward, self._states, calls, step.loss_scale, bf16.add)
        finally:
            self._forward.discard()
        if float8.num_losses < len(calls):
            raise ConfigError(
                "the model returns no loss, so its gradients are unknown; return it (a 0-dim tensor, or an output with "
                "a loss), or set shadow_every=0"
            )
        sums = weight * float8.loss, weight * bf16.loss, weight, *(weight.square() * bf16.products())
        return torch.stack(sums).tolist()


class _Pass:
    """The loss and the gradients of one pass.

    ``other``: an earlier pass, with whose gradients those of this one are multiplied as they come; both are dropped.
    """

    def __init__(self, device: torch.device, other: _Pass | None = None) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.num_losses = 0
        self._other = other
        self._gradients: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()  # a reentrant checkpoint gives a gradient in parts
        self._products = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, kind: str, name: str, tensor: Tensor) -> None:
        """Takes what ``run_again`` sees."""
        if kind == "loss":
            self.loss += tensor.detach()
            self.num_losses += 1
        elif kind == "gradient":
            before = self._gradients.get(name)
            self._gradients[name] = tensor.detach().clone() if before is None else before + tensor
            self._counts[name] += 1
            if self._other is not None and self._counts[name] == self._other._counts[name]:
                self._multiply(self._other, name)

    def products(self) -> Tensor:
        """Returns the dot product with the other gradient, the square of that, and of the own: FP64 [3]."""
        assert self._other is not None
        for name in {**self._other._gradients, **self._gradients}:  # such as an expert that one pass has not chosen
            self._multiply(self._other, name)
        return self._products

    def _multiply(self, other: _Pass, name: str) -> None:
        first, own = other._gradients.pop(name, None), self._gradients.pop(name, None)
        pairs = (first, own), (first, first), (own, own)
        for sum_, (a, b) in zip(self._products.unbind(), pairs, strict=True):
            if a is not None and b is not None:
                sum_ += (a.float() * b.float()).sum(dtype=torch.float64)
