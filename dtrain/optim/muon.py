"""Muon's rule; its hyper-parameters are ``dtrain.config.optim.Muon``."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dtrain.config.optim import Muon
from dtrain.optim.rule import MatrixRule, StateSpec, UpdateGroup, UpdateScalars

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # those of Jordan et al.: the steepest slope at zero
_EPS = 1e-7


class MuonRule(MatrixRule):
    """Muon (Jordan et al., 2024): the momentum of a matrix, orthogonalized; decoupled weight decay.

    On a single rank the bits are those of ``torch.optim.Muon`` for the same gradients.

    Args:
        record: hyper-parameters.
        splits: rows of the matrices that a fused parameter holds, by its name.
    """

    states = (StateSpec("momentum"),)

    def __init__(self, record: Muon, splits: Mapping[str, tuple[int, ...]]) -> None:
        self._record = record
        self.splits = splits

    def begin(self, group: UpdateGroup, grads: list[Tensor], outputs: list[Tensor], scalars: UpdateScalars) -> None:
        """Averages the gradients into the momentum; writes what is to be orthogonalized."""
        _, _, grad_divisor, found_inf = scalars.tensors
        scalars.rescale(grads)
        is_skipped, beta = found_inf != 0, self._record.momentum
        for grad, momentum, output in zip(grads, *group.states, outputs, strict=True):
            grad.div_(grad_divisor)
            moved = momentum.lerp(grad, 1 - beta)
            output.copy_(grad.lerp(moved, beta) if self._record.nesterov else moved)
            # chosen, not multiplied: a skipped gradient may be Inf or NaN
            torch.where(is_skipped, momentum, moved, out=momentum)

    def transform(self, matrix: Tensor) -> Tensor:
        """Orthogonalizes ``matrix``."""
        return orthogonalize(matrix, self._record.ns_steps)

    def finish(
        self, group: UpdateGroup, moves: list[Tensor], shapes: list[tuple[int, int]], scalars: UpdateScalars
    ) -> None:
        """Moves the masters, after the decay."""
        is_skipped = scalars.tensors[3] != 0
        for master, move, shape in zip(group.masters, moves, shapes, strict=True):
            moved = master.mul(1 - scalars.lr * group.weight_decay)
            moved.add_(move, alpha=-scalars.lr * self._lr_factor(*shape))
            torch.where(is_skipped, master, moved, out=master)

    def _lr_factor(self, rows: int, columns: int) -> float:
        if self._record.adjust_lr == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))

    def cost(self, shape: tuple[int, int]) -> float:
        """Returns the multiplications of one product, up to a factor."""
        return float(max(shape) * min(shape) ** 2)


def orthogonalize(matrix: Tensor, num_steps: int) -> Tensor:
    """Returns about the orthogonal factor of ``matrix`` [rows, columns] BF16, by Newton-Schulz; may overwrite it.

    The quintic iteration of Jordan et al. (2024, kellerjordan.github.io/posts/muon), which takes the singular values to
    about 1 (0.5 to 1.5), with the operations of ``torch.optim.Muon`` in their order, so that the bits are the same.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x.div_(x.norm().clamp(min=_EPS))  # the iteration needs a spectral norm of at most 1
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
