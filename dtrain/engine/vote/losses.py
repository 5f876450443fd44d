"""The losses and weights of this rank's micro-batches in one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dtrain.errors import ContractError, UsageError
from dtrain.precision.forward import find_loss

_CAPACITY = 8  # micro-batches for which there is room at first


class LossAccumulator:
    """The losses and weights of this rank's micro-batches.

    They are written into one buffer as they come, so that the vote needs no launch to gather them.

    Attributes:
        micro_batches: their numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self.micro_batches: list[int] = []
        self._use(torch.empty(2, _CAPACITY, device=device))

    def _use(self, values: Tensor) -> None:
        self._values = values  # FP32 [2, capacity], losses and weights
        self._elements = [row.unbind() for row in values.unbind()]

    def __len__(self) -> int:
        return len(self.micro_batches)

    def add(self, micro_batch: int, loss: Tensor, weight: Tensor) -> None:
        """Records a backward; copies both tensors, because the caller may change them in place before the step.

        Raises:
            UsageError: a second backward on one micro-batch.
        """
        if micro_batch in self.micro_batches:
            raise UsageError(
                "a second engine.backward on one micro-batch; for gradient accumulation write "
                "'for micro in engine.accumulate(batch):' or 'with engine.micro_batch(last=...):', and add up several "
                "losses before one backward"
            )
        count, capacity = len(self), self._values.shape[1]
        if count == capacity:
            larger = self._values.new_empty(2, 2 * capacity)
            larger[:, :capacity] = self._values
            self._use(larger)
        self.micro_batches.append(micro_batch)
        for elements, value in zip(self._elements, (loss, weight), strict=True):
            elements[count].copy_(value.detach())

    def clear(self) -> None:
        self.micro_batches.clear()

    def values(self) -> Tensor:
        """Returns FP32 [2, n], the losses and the weights, which the next step overwrites."""
        return self._values[:, : len(self)]


def refuse_options(options: Mapping[str, Any], method: str = "engine.backward") -> None:
    """Raises ``UsageError`` for an option of ``Tensor.backward`` that is on, or that there is not."""
    given = [name for name, value in options.items() if value not in (None, False)]
    if given:
        raise UsageError(
            f"{method}({given[0]}=...): expected loss and weight only, because an engine runs one backward of a "
            f"micro-batch, to all parameters, and frees its graph; leave it out, and add the losses of one forward"
        )


def checked_loss(loss: Any, *, is_dummy: bool) -> Tensor:
    """Returns the 0-dim loss inside ``loss``, a tensor or a model's output.

    Args:
        loss: the argument of ``engine.backward``.
        is_dummy: its weight is 0, so it may have no graph.

    Raises:
        ContractError: it is not FP32.
        UsageError: there is no 0-dim loss, or it has no graph.
    """
    value = find_loss(loss)
    if value is None:
        shape = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise UsageError(
            f"engine.backward expected a 0-dim loss tensor, or an output with a 0-dim 'loss'; got one {shape}"
        )
    if value.dtype != torch.float32:
        raise ContractError(
            f"the loss is {value.dtype}; the contract says float32. Compute it in FP32, for instance "
            f"F.cross_entropy(logits.float(), targets)"
        )
    if not value.requires_grad and not is_dummy:
        raise UsageError(
            "the loss has no graph, so there is nothing to train on; was it detached, or computed in "
            "engine.eval()? Only a dummy with weight=0 may come without one"
        )
    return value
