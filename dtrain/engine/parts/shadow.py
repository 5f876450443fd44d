"""Computes one micro-batch in BF16 too, forward and backward, and compares loss and gradients with those of FP8."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dtrain.distributed.consensus import on_every_rank
from dtrain.engine.parts.forward_calls import REPLAYED
from dtrain.engine.parts.part import StepPart, StepUnderWay
from dtrain.engine.parts.replay import MicroBatchReplay
from dtrain.engine.vote.losses import LossAccumulator
from dtrain.errors import ConfigError
from dtrain.precision.contract import Contract
from dtrain.precision.float8.linear import products_in_bf16


@dataclass(frozen=True)
class Float8Gap:
    """What FP8 changes in the first micro-batch of each rank in ``step`` (from 1), over all parameters; may be NaN.

    ``loss`` is (FP8 - BF16) / |BF16|; ``cosine`` is that of the gradients before they are summed, in which some of the
    errors cancel; ``norm_ratio`` is FP8 / BF16.
    """

    step: int
    loss: float
    cosine: float
    norm_ratio: float


class ShadowStep(StepPart):
    """Runs the first micro-batch of every N-th step again before the update, once in FP8 and once in BF16.

    Nothing of it stays, as of a replay. In BF16 an FP8 product takes what the FP8 copy of its weight represents, which
    BF16 holds exactly: the gap is that of the casts of inputs and gradients. Compiled blocks run as plain code then.
    Meanwhile every rank holds a gradient of each whole parameter, in its dtype, and the FP8 weights in BF16.
    ``latest`` is the last comparison.
    """

    def __init__(self, contract: Contract, replay: MicroBatchReplay, losses: LossAccumulator) -> None:
        self.latest: Float8Gap | None = None
        self._contract, self._replay, self._losses = contract, replay, losses

    def before_update(self, step: StepUnderWay) -> None:
        """Compares, if it is due; all ranks call together, because forwards may communicate."""
        if not self._contract.is_shadowed(step.number + 1):
            return
        rows = on_every_rank(self._replay.forward.comm, "float8.shadow_every", lambda: self._sums(step), ConfigError)
        weight, float8, bf16, dot, *squares = torch.tensor(rows, dtype=torch.float64).sum(0)
        if weight:  # else all were dummies
            (first, second), loss = torch.stack(squares).sqrt(), (float8 - bf16) / bf16.abs()
            self.latest = Float8Gap(step.number + 1, *map(float, (loss, dot / (first * second), first / second)))

    def _sums(self, step: StepUnderWay) -> list[float]:
        """Returns this rank's addends: the weight, both losses, and the products of its gradients."""
        calls, values = self._replay.calls.of(step.number, REPLAYED), self._losses.values()
        if not calls or REPLAYED not in self._losses.micro_batches:
            return [0.0] * 6
        place = self._losses.micro_batches.index(REPLAYED)
        passes, weight = _Passes(values.device), values[1:, place].double()
        try:
            self._replay.run(calls, step.loss_scale, partial(passes.add, 0))
            with products_in_bf16():
                self._replay.run(calls, step.loss_scale, partial(passes.add, 1))
        finally:
            self._replay.forward.discard()
        if passes.num_losses < 2 * len(calls):
            raise ConfigError("the model returns no loss; return a 0-dim tensor, or an output with a loss")
        losses, products = passes.sums().split((2, 3))
        return torch.cat((weight, weight * losses, weight**2 * products)).tolist()


class _Passes:
    """The losses of two passes, and the products of their gradients, each dropped when the second has come."""

    def __init__(self, device: torch.device) -> None:
        self.num_losses = 0
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._parts: tuple[dict[str, list[Tensor]], ...] = {}, {}  # a reentrant checkpoint gives several

    def add(self, number: int, kind: str, name: str, tensor: Tensor) -> None:
        """Takes what pass ``number`` sees, 0 or 1."""
        if kind == "loss":
            self._sums[number] += tensor.detach()
            self.num_losses += 1
        elif kind == "gradient":
            parts = self._parts[number].setdefault(name, [])
            parts.append(tensor.detach().clone())
            if number and len(parts) == len(self._parts[0].get(name, ())):
                self._multiply(name)

    def sums(self) -> Tensor:
        """Returns FP64 [5]: both losses, the dot product of the gradients, and the squares of their norms."""
        for name in {**self._parts[0], **self._parts[1]}:  # such as of an expert that one pass has not chosen
            self._multiply(name)
        return self._sums

    def _multiply(self, name: str) -> None:
        first, second = (sum(parts.pop(name, ()), self._sums.new_zeros(())).float() for parts in self._parts)
        pairs = ((first, second), (first, first), (second, second))
        self._sums[2:] += torch.stack([(a * b).sum(dtype=torch.float64) for a, b in pairs])
