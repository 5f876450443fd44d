"""The rule of ``dtrain.TorchOptimizer``: a class of torch's optimizers on parameters that are the masters.

``dtrain.optim.torch_probe`` finds the states that the class keeps, and proves that it updates each element by
itself. Tensors of the masters' shape become states of the engine. Numbers that a class keeps for each parameter, such
as ``step``, depend on the number of the update only, so all elements with as many updates share them: the rule keeps
them on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.config.optim import TorchOptimizer
from dtrain.optim.rule import ElementwiseRule, UpdateGroup, UpdateScalars
from dtrain.optim.torch_probe import probe
from dtrain.optim.torch_states import BoundOptimizer

_Key = tuple[tuple[int, int], ...]  # address and number of elements of each tensor
_NUMBER = "applied_steps"
"""Key of a saved state: number of the update that the numbers beside it follow."""

_MAX_NUMBERS = 4096  # counts of updates whose shared numbers are kept; others are computed again


class TorchRule(ElementwiseRule):
    """A torch optimizer; whether an update is skipped is read on the host, on a GPU for each parameter apart too.

    Args:
        record: the class and its options.
        device: device of the masters, on which the class is probed.

    Raises:
        ConfigError: the class cannot be built with the options, needs whole tensors, or keeps what cannot be sharded.
    """

    def __init__(self, record: TorchOptimizer, device: torch.device) -> None:
        self._device = device
        self._kept = probe(record, device)
        self.states = tuple(self._kept.tensors.values())
        self._bound: dict[_Key, BoundOptimizer] = {}  # of the current update
        self._earlier: dict[_Key, BoundOptimizer] = {}  # of the one before it
        self._update: Tensor | None = None  # the divisor of the current update, which stands for it
        self.load_state_dict({})

    def state_dict(self) -> dict[str, float]:
        """Returns the shared numbers that a resumed run would otherwise compute again, and their update's number."""
        number = max(self._numbers)
        return {_NUMBER: number, **self._numbers[number]} if self._kept.numbers else {}

    def load_state_dict(self, values: dict[str, float]) -> None:
        """Restores the shared numbers; any earlier ones will do, because ``apply`` computes what is missing."""
        first, number = dict(self._kept.numbers), int(values.get(_NUMBER, 0))
        self._numbers = {0: first}  # by the number of updates before
        if number:
            self._numbers[number] = {name: values.get(name, own) for name, own in first.items()}

    def apply(self, group: UpdateGroup, grads: list[Tensor], scalars: UpdateScalars) -> None:
        """Updates masters and states in place by the class, or none if the update is skipped."""
        if scalars.is_skipped or not group.masters:
            return
        if self._update is not scalars.grad_divisor:
            self._update = scalars.grad_divisor
            self._bound, self._earlier = {}, self._bound
        scalars.rescale(grads)
        torch._foreach_div_(grads, scalars.tensors[2])
        bound, before = self._bind(group), self._numbers_after(scalars.step - 1)
        self._numbers[scalars.step] = bound.update(grads, scalars.step, scalars.lr, group.weight_decay, before)
        while len(self._numbers) > _MAX_NUMBERS:
            del self._numbers[next(number for number in self._numbers if number)]  # the one computed first

    def _numbers_after(self, count: int) -> dict[str, float]:
        """Returns the shared numbers after ``count`` updates; parameters that have missed some have a smaller count."""
        if count not in self._numbers and self._kept.numbers:
            element = torch.zeros(1, device=self._device)
            replay = BoundOptimizer(self._kept, [element], [[spec.like(element)] for spec in self.states])
            nearest = max(number for number in self._numbers if number < count)
            values = self._numbers[nearest]
            for missing in range(nearest + 1, count + 1):
                values = replay.update([torch.zeros_like(element)], missing, 0.0, 0.0, values)
            self._numbers[count] = values
        return self._numbers.get(count, {})

    def _bind(self, group: UpdateGroup) -> BoundOptimizer:
        """Returns the optimizer of these tensors; calls repeat with the same ones at every update."""
        tensors = [tensor for tensors in (group.masters, *group.states) for tensor in tensors]
        key = tuple((tensor.data_ptr(), tensor.numel()) for tensor in tensors)
        if key not in self._bound:
            # one that the previous update did not use is dropped: its tensors may be gone
            known = self._earlier.pop(key, None)
            self._bound[key] = known or BoundOptimizer(self._kept, group.masters, group.states)
        return self._bound[key]
