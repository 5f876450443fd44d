"""The interface between an optimizer and the engines: states as data, and an update over slices of tensors.

A ``Rule`` names the states that it keeps beside each master. An ``ElementwiseRule`` updates lists of tensors
in place; a ``MatrixRule`` needs whole matrices for a part of its update. Engines allocate the states, shard them
as the masters, save them under their names and count their bytes; none knows an optimizer.
``dtrain.optim.rules`` lists the rules, ``dtrain.parameters.optimizer_plan`` chooses one for each parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from dtrain.precision.fake import block_starts
from dtrain.precision.remainder import Numbers

Item = TypeVar("Item")


@dataclass(frozen=True)
class StateSpec:
    """One state of an optimizer: a tensor with an element for each element of the masters.

    Attributes:
        name: its name in the engine, and its kind in checkpoints: a lower-case word.
        dtype: dtype in which it is kept and saved.
        init: value of every element before the first update; None: the master's.
    """

    name: str
    dtype: torch.dtype = torch.float32
    init: float | None = 0.0

    def fill(self, state: Tensor, master: Tensor) -> None:
        """Gives ``state`` its values before the first update of ``master``."""
        if self.init is None:
            state.copy_(master.view_as(state))
        else:
            state.fill_(self.init)

    def like(self, master: Tensor) -> Tensor:
        """Returns the state of ``master`` before the first update."""
        state = torch.empty_like(master, dtype=self.dtype, requires_grad=False)
        self.fill(state, master.detach())
        return state


Source = tuple[int | None, float]
"""Source of a learning rate: the rule that has a schedule of its own, or None; and a factor of that rate."""

Numbers32 = Callable[[float, int], Sequence[float]]
"""Numbers of an update that follow from its learning rate and step; the same function in each step."""


class SentNumbers:
    """The numbers of an update that the host computes and the device reads from memory.

    The host sends all of them in one copy a step. Which they are is learned in the first step, in which each is filled
    in by itself. No number is an argument of a kernel, so a step can be captured and replayed with other numbers.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[Source, Numbers32], tuple[int, int]] = {}
        self._num_sent = 0
        self._values: Tensor | None = None  # FP32 [num_sent] on the device

    @property
    def count(self) -> int:
        """Number of numbers that an update has asked for."""
        return max((stop for _, stop in self._places.values()), default=0)

    def compute(self, lr: float, step: int, rule_lrs: Sequence[tuple[int, float]]) -> list[float]:
        """Returns the numbers of one update, in the order in which they are sent."""
        of_rule: dict[int | None, float] = dict(rule_lrs)
        found: list[float] = []
        for (rule, factor), function in self._places:
            found += function(of_rule.get(rule, lr) * factor, step)
        self._num_sent = len(found)
        return found

    def receive(self, values: Tensor) -> None:
        """Takes what ``compute`` returned, FP32 on the device."""
        self._values = values[: self._num_sent]

    def get(self, scalars: UpdateScalars, function: Numbers32) -> Tensor:
        """Returns the numbers of ``function`` on the device, FP32."""
        place = self._places.get((scalars.source, function))
        if self._values is not None and place is not None and place[1] <= len(self._values):
            return self._values[slice(*place)]
        found = scalars.fill(function)
        if place is None:
            start = self.count
            self._places[scalars.source, function] = start, start + len(found)
        return found


WIDE = 100
"""Exponent of the largest divisor that main grads are divided by as it is; that of the smallest is its negative."""


@dataclass(frozen=True)
class UpdateScalars:
    """Scalars that all slices of one update share.

    Attributes:
        lr: learning rate of this update.
        step: number of this update, counted from 1, for the bias correction.
        grad_divisor: divisor of the main grads: loss scale x sum of weights / clip coefficient; 0-dim, any float dtype.
            It may exceed what FP32 holds; ``tensors`` and ``grad_factor`` do not.
        found_inf: if it is not 0, the update is skipped, and masters, states and replicas keep their bits, whatever the
            main grads are; 0-dim, any float dtype, on the device of ``grad_divisor``.
        rule_lrs: learning rates of rules with a schedule of their own, by the rule's number.
        source: of ``lr``.
        sent: what the host has sent; None: ``on_device`` fills numbers in.
        others: the scalars of parameters that are not updated as all others, by name: they have missed updates, or miss
            this one. None leaves a parameter alone.
    """

    lr: float
    step: int
    grad_divisor: Tensor
    found_inf: Tensor
    rule_lrs: tuple[tuple[int, float], ...] = ()
    source: Source = (None, 1.0)
    sent: SentNumbers | None = None
    others: Mapping[str, UpdateScalars | None] = field(default_factory=dict)

    def on_device(self, function: Numbers32) -> Tensor:
        """Returns what ``function`` makes of ``lr`` and ``step``, FP32 [n], without a wait."""
        return self.fill(function) if self.sent is None else self.sent.get(self, function)

    def fill(self, function: Numbers32) -> Tensor:
        """Returns the same in new memory, filled in on the device: a copy from pageable host memory would wait."""
        numbers = function(self.lr, self.step)
        found = torch.empty(len(numbers), dtype=torch.float32, device=self.grad_divisor.device)
        for place, number in zip(found.unbind(), numbers, strict=True):
            place.fill_(number)
        return found

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns all four as 0-dim FP32 tensors; ``found_inf`` is 0 or 1.

        The divisor is that of main grads times ``grad_factor``.
        """
        # copies, because a compiled graph is specialized on where in memory its inputs lie
        lr, step = (number.clone() for number in self.on_device(_lr_and_step).unbind())
        _, divisor = self._factor_and_divisor
        return lr, step, divisor, self._is_skipped.to(torch.float32)

    @property
    def grad_factor(self) -> Tensor:
        """A power of two, 0-dim FP32, by which main grads are multiplied before they are divided; 1 if skipped.

        It is 1 too if the divisor lies in the middle of FP32's range, so main grads keep their bits in either case.
        """
        return self._factor_and_divisor[0]

    @cached_property
    def _factor_and_divisor(self) -> tuple[Tensor, Tensor]:
        divisor = torch.where(self._is_skipped, 1.0, self.grad_divisor.detach().double())
        exponent = (divisor.view(torch.int64) >> 52) - 1023
        shift = (exponent.clamp(-WIDE, WIDE) - exponent).clamp(-126, 126)
        factor = ((shift + 1023) << 52).view(torch.float64)  # 2^shift; a power function could round
        finite = torch.finfo(torch.float32)
        return factor.to(torch.float32), (divisor * factor).clamp(finite.tiny, finite.max).to(torch.float32)

    @cached_property
    def _is_skipped(self) -> Tensor:
        return self.found_inf.detach() != 0

    def rescale(self, grads: Sequence[Tensor]) -> None:
        """Multiplies ``grads`` by ``grad_factor``, for an update that takes a divisor only."""
        # only a CPU knows without waiting that there is nothing to do
        if grads and (self.grad_divisor.device.type != "cpu" or self._has_factor):
            torch._foreach_mul_(list(grads), self.grad_factor)

    @cached_property
    def _has_factor(self) -> bool:
        return float(self.grad_factor) != 1

    @cached_property
    def is_skipped(self) -> bool:
        """Whether ``found_inf`` is set, for a rule that cannot decide on a GPU; reading it waits for the GPU."""
        first = next(iter(self._by_source.values()))
        return bool(self.found_inf) if first is self else first.is_skipped

    @cached_property
    def _by_source(self) -> dict[Source, UpdateScalars]:
        return {self.source: self}

    def _with(self, source: Source, lr: float) -> UpdateScalars:
        if source not in self._by_source:
            others = {name: other and other._with(source, lr) for name, other in self.others.items()}
            other = self._by_source[source] = replace(self, lr=lr, source=source, others=others)
            other.__dict__["_by_source"] = self._by_source  # so ``is_skipped`` is read once for all
        return self._by_source[source]

    def scaled(self, lr_factor: float) -> UpdateScalars:
        """Returns the same with the learning rate times ``lr_factor``; equal factors give the same object."""
        rule, factor = self.source
        return self._with((rule, factor * lr_factor), self.lr * lr_factor)

    def of_rule(self, number: int) -> UpdateScalars:
        """Returns the same with the learning rate of rule ``number``; rules without their own give the same object."""
        own = dict(self.rule_lrs)
        return self._with((number, 1.0), own[number]) if number in own else self

    def to(self, device: torch.device) -> UpdateScalars:
        """Returns the same with its tensors on ``device``."""
        return self.with_tensors(self.grad_divisor.to(device), self.found_inf.to(device))

    def with_tensors(self, grad_divisor: Tensor, found_inf: Tensor) -> UpdateScalars:
        """Returns the same with these tensors, which have the same values elsewhere; the others' follow them."""
        own = {id(other): other for other in self.others.values() if other is not None}  # what they share stays shared
        flags = {key: other.found_inf for key, other in own.items() if other.found_inf is not self.found_inf}
        if flags and found_inf.device != self.found_inf.device:  # in one copy
            flags = dict(zip(flags, torch.stack([*flags.values()]).to(found_inf.device).unbind(), strict=True))
        moved = {
            key: replace(other, grad_divisor=grad_divisor, found_inf=flags.get(key, found_inf), sent=None)
            for key, other in own.items()
        }
        others = {name: other and moved[id(other)] for name, other in self.others.items()}
        sent = self.sent if grad_divisor.device == self.grad_divisor.device else None  # which lies on that device
        return replace(self, grad_divisor=grad_divisor, found_inf=found_inf, sent=sent, others=others)

    def split(
        self, items: Sequence[Item], name_of: Callable[[Item], str]
    ) -> Iterator[tuple[UpdateScalars, Sequence[Item]]]:
        """Yields the items of the parameters that share scalars, with these; those that are left alone are left out."""
        if not self.others:
            yield self, items
            return
        found: dict[int, tuple[UpdateScalars, list[Item]]] = {}
        for item in items:
            own = self.others.get(name_of(item), self)
            if own is not None:
                found.setdefault(id(own), (own, []))[1].append(item)
        yield from found.values()


def _lr_and_step(lr: float, step: int) -> Sequence[float]:
    return lr, float(step)


@dataclass(frozen=True, order=True)
class UpdateClass:
    """Hyper-parameters by which parameters of one rule may differ.

    Attributes:
        rule: number of the rule that updates them.
        weight_decay: decoupled weight decay, or the rule's own meaning of it.
        lr_factor: their learning rate, as a multiple of the rule's.
    """

    rule: int = 0
    weight_decay: float = 0.0
    lr_factor: float = 1.0


@dataclass(frozen=True)
class UpdateSlice:
    """A range of elements of one update class; all tensors are 1-D and of one length.

    Attributes:
        origin: (key, index): what the elements lie in, and the index of the first one there. Equal at every sharding,
            so random numbers follow from it.
        master: FP32; a pair is written with its replica.
        main_grad: FP32 or BF16.
        states: in the order of the rule's ``states``.
        replica: the masters are cast into it; None if it is a part of the masters' storage, or is cast later.
        average: moving average of the masters; None: none is kept.
        name: of the only parameter in it, if that may have scalars of its own.
        parameters: name, first element and one past the last of each parameter, which lie apart only if they differ in
            their scalars; the last element includes padding, so that vectors of any cut begin at the same elements.
    """

    update_class: UpdateClass
    origin: tuple[int, int]
    master: Numbers
    main_grad: Tensor
    states: tuple[Tensor, ...]
    replica: Tensor | None
    average: Tensor | None = None
    name: str = ""
    parameters: tuple[tuple[str, int, int], ...] = ()

    @property
    def needs_copy(self) -> bool:
        """Whether an eager update needs FP32 copies of masters or main grads."""
        return not isinstance(self.master, Tensor) or self.main_grad.dtype != torch.float32

    def part(self, start: int, stop: int) -> UpdateSlice:
        """Returns elements ``start`` to ``stop``, without the names of their parameters."""
        part = slice(start, stop)
        return UpdateSlice(
            self.update_class,
            origin=(self.origin[0], self.origin[1] + start),
            master=self.master[part],
            main_grad=self.main_grad[part],
            states=tuple(state[part] for state in self.states),
            replica=None if self.replica is None else self.replica[part],
            average=None if self.average is None else self.average[part],
            name=self.name,
        )

    def split_at(self, names: Collection[str]) -> list[UpdateSlice]:
        """Returns the parameters called ``names``, each with its name, and the parts between them."""
        parts, cursor = [], 0
        for name, start, stop in self.parameters:
            if name in names:
                parts += [self.part(cursor, start), replace(self.part(start, stop), name=name)]
                cursor = stop
        return [part for part in (*parts, self.part(cursor, self.main_grad.numel())) if part.main_grad.numel()]

    def cut(self, size: int) -> list[UpdateSlice]:
        """Returns parts of ``size`` elements, the last one shorter."""
        return [self.part(start, start + size) for start in block_starts(self.main_grad, size)]


@dataclass(frozen=True)
class UpdateGroup:
    """Tensors with one weight decay and one learning rate, of any shape; all lists have one length.

    Attributes:
        states: a list for each of the rule's ``states``, in their order.
        origins: see ``UpdateSlice``.
    """

    weight_decay: float
    masters: list[Tensor]
    states: tuple[list[Tensor], ...]
    origins: list[tuple[int, int]]


class SegmentKernel(Protocol):
    """An update of the segments of an arena that also casts the masters into the replicas."""

    def update(self, numbers: Sequence[int], scalars: UpdateScalars) -> None:
        """Updates the segments ``numbers``, which ascend; the main grads may be overwritten."""


class MatrixKernel(SegmentKernel, Protocol):
    """An update that needs whole matrices, which the ranks exchange first."""

    def begin(self, scalars: UpdateScalars) -> None:
        """Updates the states and transforms all matrices, before the segments are updated; all ranks call."""


class Rule(ABC):
    """An optimizer with its hyper-parameters.

    Attributes:
        states: what it keeps beside each master.
        is_compiled: whether its update is compiled; on a GPU, so are the norm and the vote.
        description: what updates the masters, for the log, with ``{seconds}`` for what its making took; empty: nothing.
    """

    states: tuple[StateSpec, ...]
    is_compiled: bool = False
    description: str = ""

    @property
    def state_bytes(self) -> int:
        """Bytes of all states of one parameter element."""
        return sum(spec.dtype.itemsize for spec in self.states)

    def state_dict(self) -> dict[str, float]:
        """Returns what a checkpoint holds of the rule beside its states: numbers that all elements share, by name."""
        return {}

    def load_state_dict(self, values: dict[str, float]) -> None:  # noqa: B027 - most rules have none
        """Restores what ``state_dict`` returned; ``{}`` before the first update."""


class ElementwiseRule(Rule):
    """An optimizer that updates each element by itself, so that any cut and any sharding gives the same bits."""

    @abstractmethod
    def apply(self, group: UpdateGroup, grads: list[Tensor], scalars: UpdateScalars) -> None:
        """Updates masters and states in place, or none if ``found_inf`` is set, decided on the device.

        No result may depend on an element's position in its tensor or list, except through ``group.origins``.

        Args:
            group: the tensors to update.
            grads: their FP32 main grads, neither divided nor clipped yet; may be overwritten.
            scalars: scalars of this update, with the learning rate of the group.
        """

    def segment_kernel(self, segments: Sequence[Sequence[UpdateSlice]]) -> SegmentKernel | None:
        """Returns a kernel of the rule's own for an arena; None: ``apply`` is called block by block.

        Args:
            segments: the rule's slices in each segment; a segment may have none.

        Raises:
            ConfigError: the kernel is to be compiled and cannot be.
        """
        return None


class MatrixRule(Rule):
    """An optimizer that needs whole matrices once a step; its states are sharded as those of any other.

    An update has three phases. ``begin`` works element by element on the shards, and gives a matrix shard by
    shard; ``transform`` works on one whole matrix, at the rank that owns it in this phase; ``finish`` works on
    the shards again.

    Attributes:
        matrix_dtype: dtype in which matrices travel between ranks, both ways.
        splits: rows of the matrices that a parameter holds, by its name; a parameter without an entry is one matrix.
    """

    matrix_dtype: torch.dtype = torch.bfloat16
    splits: Mapping[str, tuple[int, ...]]

    @abstractmethod
    def begin(self, group: UpdateGroup, grads: list[Tensor], outputs: list[Tensor], scalars: UpdateScalars) -> None:
        """Updates the states and writes the elements of the matrices to ``outputs``; see ``ElementwiseRule.apply``.

        If ``found_inf`` is set, the states keep their bits; ``outputs`` may be anything.
        """

    @abstractmethod
    def transform(self, matrix: Tensor) -> Tensor:
        """Returns what moves the master, for the contiguous ``matrix`` [rows, columns], which may be overwritten."""

    @abstractmethod
    def finish(
        self, group: UpdateGroup, moves: list[Tensor], shapes: list[tuple[int, int]], scalars: UpdateScalars
    ) -> None:
        """Updates the masters by ``moves``, or none if the update is skipped.

        Args:
            group: the tensors to update.
            moves: their elements of the transformed matrices.
            shapes: of the matrices that they lie in.
            scalars: scalars of this update, with the learning rate of the group.
        """

    @abstractmethod
    def cost(self, shape: tuple[int, int]) -> float:
        """Returns the time of ``transform``, in any unit."""
