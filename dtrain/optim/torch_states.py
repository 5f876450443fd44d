"""An instance of an optimizer of torch over tensors that are not its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtrain.optim.rule import StateSpec


@dataclass(frozen=True)
class KeptStates:
    """States that a class keeps for each parameter, by the class's own names.

    Attributes:
        build: makes an instance from parameters, and from options that replace the user's.
        tensors: those of the parameter's shape.
        shared: the numbers, which are equal for all parameters: an example of each.
        numbers: values before the first update, of those that do not count the updates.
    """

    build: Callable[..., Optimizer]
    tensors: Mapping[str, StateSpec]
    shared: Mapping[str, Any]
    numbers: Mapping[str, float]


class BoundOptimizer:
    """An instance whose parameters and states are given tensors, which it updates in place.

    Args:
        kept: the states of the class.
        masters: FP32 tensors of any shape.
        states: a list for each of ``kept.tensors``, in their order.
    """

    def __init__(self, kept: KeptStates, masters: Sequence[Tensor], states: Sequence[Sequence[Tensor]]) -> None:
        self._kept = kept
        self._masters = [_flat(master) for master in masters]
        self._states = [
            {key: _flat(tensors[index]) for key, tensors in zip(kept.tensors, states, strict=True)}
            for index in range(len(masters))
        ]
        self._parameters = [nn.Parameter(master) for master in self._masters]
        self._optimizer = kept.build(self._parameters)
        for parameter, own in zip(self._parameters, self._states, strict=True):
            shared = {key: value.clone() if isinstance(value, Tensor) else value for key, value in kept.shared.items()}
            self._optimizer.state[parameter] = {**own, **shared}

    @torch.no_grad()
    def update(
        self, grads: Sequence[Tensor], number: int, lr: float, weight_decay: float, numbers: Mapping[str, float]
    ) -> dict[str, float]:
        """Runs update ``number``, counted from 1.

        Args:
            grads: FP32 gradients, of the masters' shapes.
            number: number of this update.
            lr: learning rate of this update.
            weight_decay: weight decay of this update, if the class has one.
            numbers: those of ``kept.numbers`` before this update.

        Returns:
            The numbers after it.
        """
        group = self._optimizer.param_groups[0]
        group["lr"] = lr
        if "weight_decay" in group:
            group["weight_decay"] = weight_decay
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.grad = _flat(grad)
            self._set_shared(parameter, {key: numbers.get(key, number - 1) for key in self._kept.shared})
        self._optimizer.step()
        for index in range(len(self._parameters)):
            self._restore(index)
        first = self._optimizer.state[self._parameters[0]]
        return {key: float(first[key]) for key in self._kept.numbers}

    def _set_shared(self, parameter: nn.Parameter, values: Mapping[str, float]) -> None:
        state = self._optimizer.state[parameter]
        for key, value in values.items():
            if isinstance(state[key], Tensor):
                state[key].fill_(value)
            else:
                state[key] = type(state[key])(value)

    def _restore(self, index: int) -> None:
        """Copies what the class has put into new tensors into the given ones."""
        parameter, master = self._parameters[index], self._masters[index]
        parameter.grad = None
        if parameter.data_ptr() != master.data_ptr():
            master.copy_(parameter)
            parameter.data = master
        state = self._optimizer.state[parameter]
        for key, tensor in self._states[index].items():
            if state[key] is not tensor:
                tensor.copy_(state[key])
                state[key] = tensor


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach()
