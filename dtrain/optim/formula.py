"""An optimizer's update as a formula in plain tensor code, written once, run eagerly or compiled.

A formula is given FP32 tensors of any shape and 0-dim FP32 tensors, and returns the new values. What all formulas share
is here: the division of the gradient, the skip, and states in BF16, which are read as FP32 and rounded stochastically
(``dtrain.optim.stochastic``). Formulas use additions, products, quotients, roots and selections only: these are
rounded in the same way wherever an element lies, so any cut and any sharding gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.optim.stochastic import Noise, random_bits, round_to_bf16

MAX_BLOCK = 2**30
"""Elements of one evaluation on a GPU: few enough that an index is an int32."""


@dataclass(frozen=True)
class Formula:
    """The update of one element.

    Attributes:
        coefficients: (constants, lr, step) -> what all elements share; all are 0-dim FP32 tensors.
        update: (master, gradient, states, weight decay, coefficients) -> the new master and states.
    """

    coefficients: Callable[[Sequence[Tensor], Tensor, Tensor], Sequence[Tensor]]
    update: Callable[[Tensor, Tensor, Sequence[Tensor], Tensor, Sequence[Tensor]], Sequence[Tensor]]

    def shared(
        self,
        constants: Tensor,
        lr: Tensor,
        step: Tensor,
        grad_divisor: Tensor,
        found_inf: Tensor,
        grad_factor: Tensor,
    ) -> Tensor:
        """Returns FP32 [3 + number of coefficients]: the divisor, whether to skip, the factor, and the coefficients."""
        return torch.stack((grad_divisor, found_inf, grad_factor, *self.coefficients(constants.unbind(), lr, step)))

    def updated(
        self, tensors: Sequence[Tensor], weight_decay: Tensor, shared: Tensor, noise: Noise | None
    ) -> list[Tensor]:
        """Returns the new master and states, the latter in their own dtypes.

        Args:
            tensors: master, main grad and states.
            weight_decay: 0-dim.
            shared: what ``shared`` returned.
            noise: of the first element, if a state is BF16; at most two are.
        """
        master, main_grad, *states = tensors
        grad_divisor, _, grad_factor, *coefficients = shared.unbind()
        grad = main_grad.float() * grad_factor / grad_divisor
        found = self.update(master, grad, [state.float() for state in states], weight_decay, coefficients)
        if noise is None:
            return list(found)
        bits = random_bits(noise, master)
        halves = [bits & 0xFFFF, (bits >> 16) & 0xFFFF]  # of one hash, 16 bits for each state
        rounded = [
            round_to_bf16(value, halves.pop()) if state.dtype == torch.bfloat16 else value
            for state, value in zip(states, found[1:], strict=True)
        ]
        return [found[0], *rounded]
