"""The rule of :class:`dtrain.TorchOptimizer`: a class of torch's optimizers on parameters that are the masters.

:mod:`dtrain.optim.torch_probe` finds the states that the class keeps, and proves that it updates each element by
itself. Tensors of the masters' shape become states of the engine. Numbers that a class keeps for each parameter, such
as ``step``, depend on the number of the update only, so all elements share them: the rule keeps them on the host.
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


class TorchRule(ElementwiseRule):
    """A torch optimizer; whether an update is skipped is read on the host, once per update on a GPU.

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
        self.load_state_dict({})

    def state_dict(self) -> dict[str, float]:
        """Returns the shared numbers that a resumed run would otherwise compute again, and their update's number."""
        return {_NUMBER: self._number, **self._after} if self._after else {}

    def load_state_dict(self, values: dict[str, float]) -> None:
        """Restores the shared numbers; any earlier ones will do, because :meth:`apply` computes what is missing."""
        self._number = int(values.get(_NUMBER, 0))
        self._after = {
            name: values.get(name, first) if self._number else first for name, first in self._kept.numbers.items()
        }
        self._before = self._after

    def apply(self, group: UpdateGroup, grads: list[Tensor], scalars: UpdateScalars) -> None:
        """Updates masters and states in place by the class, or none if the update is skipped."""
        if scalars.is_skipped or not group.masters:
            return
        self._begin(scalars.step)
        scalars.rescale(grads)
        torch._foreach_div_(grads, scalars.tensors[2])
        bound = self._bind(group)
        self._after = bound.update(grads, scalars.step, scalars.lr, group.weight_decay, self._before)

    def _begin(self, number: int) -> None:
        """Sets the shared numbers to those before update ``number``, of which this may be any call."""
        if number == self._number:
            return
        if self._after and number > self._number + 1:  # this rank had no elements to update, or nothing was saved
            element = torch.zeros(1, device=self._device)
            replay = BoundOptimizer(self._kept, [element], [[spec.like(element)] for spec in self.states])
            for missing in range(self._number + 1, number):
                self._after = replay.update([torch.zeros_like(element)], missing, 0.0, 0.0, self._after)
        self._before, self._number = self._after, number
        self._bound, self._earlier = {}, self._bound

    def _bind(self, group: UpdateGroup) -> BoundOptimizer:
        """Returns the optimizer of these tensors; calls repeat with the same ones at every update."""
        tensors = [tensor for tensors in (group.masters, *group.states) for tensor in tensors]
        key = tuple((tensor.data_ptr(), tensor.numel()) for tensor in tensors)
        if key not in self._bound:
            # one that the previous update did not use is dropped: its tensors may be gone
            known = self._earlier.pop(key, None)
            self._bound[key] = known or BoundOptimizer(self._kept, group.masters, group.states)
        return self._bound[key]
