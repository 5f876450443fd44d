"""The optimizer that DeepSpeed wraps, and the tensors that it updates."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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

    def add_states(self, partitions: Iterable[Partition]) -> None:
        """Gives each partition the rule's states, under their names, before the first update."""
        for partition in partitions:
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
            states = tuple([self.state[p][spec.name] for p in masters] for spec in rule.states)
            origins = [(zlib.crc32(repr((group["update_class"], n)).encode()), 0) for n in range(len(masters))]
            scalars = self.scalars.of_rule(update_class.rule).scaled(update_class.lr_factor)
            rule.apply(
                UpdateGroup(update_class.weight_decay, masters, states, origins), [p.grad for p in masters], scalars
            )
            if self._plan.ema_decay is not None:
                pairs = [(p.detach().view(-1), self.state[p][EMA.name].view(-1)) for p in masters]
                MovingAverage(self._plan.ema_decay, [pairs]).update([0], self.scalars)
