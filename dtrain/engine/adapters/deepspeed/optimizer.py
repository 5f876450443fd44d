"""The optimizer that DeepSpeed wraps, and the tensors that it updates."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dtrain.optim.average import EMA, MovingAverage
from dtrain.optim.rule import ElementwiseRule, UpdateGroup, UpdateScalars
from dtrain.parameters.optimizer_plan import OptimizerPlan
from dtrain.sharding.layout import ShardInterval


@dataclass(frozen=True)
class Partition:
    """One tensor of this rank's masters.

    Attributes:
        master: FP32, updated by the optimizer; of any shape if it is one whole parameter.
        intervals: the parameters in it, in row-major order; none, if there is only padding.
        update_class: number of the update class of its parameters.
    """

    master: Tensor
    intervals: tuple[ShardInterval, ...]
    update_class: int


class _Part(NamedTuple):
    """Elements of a partition that share their scalars."""

    number: int  # of the partition
    master: Tensor
    name: str  # of their parameter, if it has scalars of its own
    cut: slice

    def of(self, values: Tensor | None) -> Tensor:
        """Returns the elements in ``values``, which have the shape of the master."""
        assert values is not None
        return values.detach().view(-1)[self.cut]


class RuleOptimizer(torch.optim.Optimizer):
    """The optimizer that DeepSpeed wraps: dtrain's rules on any partition.

    Args:
        plan: the optimizer of each parameter.
        trained: the parameters by name; those without elements are left out.

    Attributes:
        scalars: of the next update; set before it.
    """

    def __init__(self, plan: OptimizerPlan, trained: Mapping[str, nn.Parameter]) -> None:
        groups: list[dict[str, Any]] = []
        for number in range(len(plan.classes)):
            chosen = [p for name, p in trained.items() if p.numel() and plan.numbers[name] == number]
            if chosen:
                groups.append({"params": chosen, "update_class": number})
        # DeepSpeed expects a rate for its log; that of an update is in its scalars
        super().__init__(groups, {"lr": 0.0})
        self._plan = plan
        self.scalars: UpdateScalars | None = None

        self._intervals: dict[Tensor, tuple[ShardInterval, ...]] = {}  # of each partition, by its master

    def add_states(self, partitions: Iterable[Partition]) -> None:
        """Gives each partition the rule's states, under their names, before the first update."""
        for partition in partitions:
            self._intervals[partition.master] = partition.intervals
            states = [spec for k, spec in self._plan.specs.items() if self._plan.has_state(partition.update_class, k)]
            self.state[partition.master] = {spec.name: spec.like(partition.master) for spec in states}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the parameters now in its groups; DeepSpeed assigns one partition after the other."""
        assert self.scalars is not None, "DeepSpeed updates outside of engine.step"
        for group in self.param_groups:
            masters = [p for p in group["params"] if p.grad is not None]
            if not masters:
                continue
            update_class, rule = self._plan.classes[group["update_class"]], self._plan.rule_of(group["update_class"])
            assert isinstance(rule, ElementwiseRule)
            scalars = self.scalars.of_rule(update_class.rule).scaled(update_class.lr_factor)
            parts = [part for n, master in enumerate(masters) for part in self._parts(n, master, scalars.others)]
            for own, chosen in scalars.split(parts, lambda part: part.name):
                states = tuple([one.of(self.state[one.master][spec.name]) for one in chosen] for spec in rule.states)
                origins = [
                    (zlib.crc32(repr((group["update_class"], n)).encode()), cut.start) for n, _, _, cut in chosen
                ]
                updated = UpdateGroup(
                    update_class.weight_decay, [one.of(one.master) for one in chosen], states, origins
                )
                rule.apply(updated, [one.of(one.master.grad) for one in chosen], own)
                if self._plan.ema_decay is not None:
                    pairs = [(one.of(one.master), one.of(self.state[one.master][EMA.name])) for one in chosen]
                    MovingAverage(self._plan.ema_decay, [pairs]).update([0], own)

    def _parts(self, number: int, master: Tensor, names: Collection[str]) -> Iterator[_Part]:
        """Yields the parameters called ``names`` in ``master``, and, without a name, what lies between them."""
        cursor = 0
        for found in self._intervals[master] if names else ():
            if (name := found.spec.name) in names:
                stop = found.offset + found.stop - found.start
                yield _Part(number, master, "", slice(cursor, found.offset))
                yield _Part(number, master, name, slice(found.offset, stop))
                cursor = stop
        yield _Part(number, master, "", slice(cursor, master.numel()))
