"""The interface between an optimizer and the engines: states as data, and an update over slices of tensors.

A :class:`Rule` names the states that it keeps beside each master, and updates lists of tensors in place. Engines
allocate the states, shard them as the masters, save them under their names and count their bytes; none knows an
optimizer. :mod:`dtrain.optim.rules` lists the rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateSpec:
    """One state of an optimizer: a tensor with an element for each element of the masters.

    Attributes:
        name: its name in the engine, and its kind in checkpoints: a lower-case word.
        dtype: dtype in which it is kept and saved.
        init: value of every element before the first update.
    """

    name: str
    dtype: torch.dtype = torch.float32
    init: float = 0.0

    def like(self, master: Tensor) -> Tensor:
        """Returns the state of ``master`` before the first update."""
        return torch.full_like(master, self.init, dtype=self.dtype, requires_grad=False)


@dataclass(frozen=True)
class UpdateScalars:
    """Scalars that all segments of one update share.

    Attributes:
        lr: learning rate of this update.
        step: number of this update, counted from 1, for the bias correction.
        grad_divisor: divisor of the main grads: loss scale x sum of weights / clip coefficient; 0-dim, any float dtype.
        found_inf: if it is not 0, the update is skipped, and masters, states and replicas keep their bits, whatever the
            main grads are; 0-dim, any float dtype, on the device of ``grad_divisor``.
    """

    lr: float
    step: int
    grad_divisor: Tensor
    found_inf: Tensor

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns all four as 0-dim FP32 tensors, filled in on the device without a copy; ``found_inf`` is 0 or 1."""
        fill = partial(torch.full, (), dtype=torch.float32, device=self.grad_divisor.device)
        divisor, found_inf = self.grad_divisor.detach(), self.found_inf.detach() != 0
        return fill(self.lr), fill(float(self.step)), divisor.to(torch.float32), found_inf.to(torch.float32)

    def to(self, device: torch.device) -> UpdateScalars:
        """Returns the same with its tensors on ``device``."""
        return replace(self, grad_divisor=self.grad_divisor.to(device), found_inf=self.found_inf.to(device))


@dataclass(frozen=True)
class UpdateSlice:
    """A range of the arena with one weight-decay class.

    All tensors are 1-D and of one length; master and main grad are FP32.

    Attributes:
        states: in the order of the rule's ``states``.
        replica: the masters are cast into it; None if it is the masters' own storage, or is cast later.
    """

    decayed: bool
    master: Tensor
    main_grad: Tensor
    states: tuple[Tensor, ...]
    replica: Tensor | None

    def part(self, decayed: bool, start: int, stop: int) -> UpdateSlice:
        """Returns elements ``start`` to ``stop``."""
        part = slice(start, stop)
        return UpdateSlice(
            decayed,
            master=self.master[part],
            main_grad=self.main_grad[part],
            states=tuple(state[part] for state in self.states),
            replica=None if self.replica is None else self.replica[part],
        )

    def cut(self, size: int) -> list[UpdateSlice]:
        """Returns parts of ``size`` elements, the last one shorter."""
        return [self.part(self.decayed, start, start + size) for start in range(0, self.master.numel(), size)]


@dataclass(frozen=True)
class UpdateGroup:
    """Tensors of one weight-decay class, of any shape; all lists have one length.

    Attributes:
        states: a list for each of the rule's ``states``, in their order.
    """

    decayed: bool
    masters: list[Tensor]
    states: tuple[list[Tensor], ...]


class SegmentKernel(Protocol):
    """An update of the segments of an arena that also casts the masters into the replicas."""

    def update(self, numbers: Sequence[int], scalars: UpdateScalars) -> None:
        """Updates the segments ``numbers``, which ascend; the main grads may be overwritten."""


class Rule(ABC):
    """An optimizer with its hyper-parameters.

    Attributes:
        states: what it keeps beside each master.
        is_compiled: whether its update is compiled; on a GPU, so are the norm and the vote.
    """

    states: tuple[StateSpec, ...]
    is_compiled: bool = False

    @property
    def state_bytes(self) -> int:
        """Bytes of all states of one parameter element."""
        return sum(spec.dtype.itemsize for spec in self.states)

    @abstractmethod
    def apply(self, group: UpdateGroup, grads: list[Tensor], scalars: UpdateScalars) -> None:
        """Updates masters and states in place, or none if ``found_inf`` is set, decided on the device.

        No result may depend on an element's position in its tensor or list: then any cut and any sharding gives the
        same bits.

        Args:
            group: the tensors to update.
            grads: their FP32 main grads, neither divided nor clipped yet; may be overwritten.
            scalars: scalars of this update.
        """

    def segment_kernel(self, segments: Sequence[Sequence[UpdateSlice]]) -> SegmentKernel | None:
        """Returns a kernel of the rule's own for an arena; None: :meth:`apply` is called block by block.

        Raises:
            ConfigError: the kernel is to be compiled and cannot be.
        """
        return None
