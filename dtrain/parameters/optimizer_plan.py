"""Which rule updates each trained parameter, with which hyper-parameters; resolved once, before they are sharded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, permutations
from typing import Any

import torch
from torch import nn

from dtrain.config.optim import Muon, Optimizer
from dtrain.config.schedule import AnySchedule
from dtrain.errors import ConfigError
from dtrain.optim.average import EMA
from dtrain.optim.muon import MuonRule
from dtrain.optim.rule import Rule, StateSpec, UpdateClass
from dtrain.optim.rules import rule_of
from dtrain.parameters.groups import decayed_names, matching_parameters
from dtrain.parameters.muon import muon_parameters


@dataclass(frozen=True)
class OptimizerPlan:
    """The rules of a model, and the update class of each trained parameter.

    Attributes:
        rules: those of the hyper-parameters in use.
        schedules: learning-rate schedule of each rule; None: the run's.
        classes: the distinct update classes, those of one rule adjacent; a flat buffer is ordered by their numbers.
        numbers: number of its class, by parameter name.
        record: the hyper-parameters that it was made from.
        ema_decay: of the moving average that every parameter has beside the states of its rule; None: no average.
    """

    rules: tuple[Rule, ...]
    schedules: tuple[AnySchedule | None, ...]
    classes: tuple[UpdateClass, ...]
    numbers: Mapping[str, int]
    record: Optimizer
    ema_decay: float | None = None

    @cached_property
    def specs(self) -> dict[str, StateSpec]:
        """Every state that any parameter has, by name."""
        found = {spec.name: spec for rule in self.rules for spec in rule.states}
        return found if self.ema_decay is None else {**found, EMA.name: EMA}

    @property
    def is_compiled(self) -> bool:
        return any(rule.is_compiled for rule in self.rules)

    def rule_of(self, number: int) -> Rule:
        """Returns the rule of update class ``number``."""
        return self.rules[self.classes[number].rule]

    def has_state(self, number: int, kind: str) -> bool:
        """Whether parameters of update class ``number`` have the state ``kind``; all have masters and main grads."""
        is_of_all = kind not in self.specs or kind == EMA.name
        return is_of_all or kind in {spec.name for spec in self.rule_of(number).states}

    def kinds(self, name: str) -> list[str]:
        """Returns the names of the states of parameter ``name``."""
        return [kind for kind in self.specs if self.has_state(self.numbers[name], kind)]

    def state_bytes(self, numels: Mapping[str, int]) -> int:
        """Returns the bytes of all states of parameters with these numbers of elements."""
        average = 0 if self.ema_decay is None else EMA.dtype.itemsize
        return sum((self.rule_of(self.numbers[name]).state_bytes + average) * n for name, n in numels.items())

    def rule_lrs(self, peak: float, applied_steps: int) -> tuple[tuple[int, float], ...]:
        """Returns (number, learning rate) of each rule with a schedule of its own."""
        return tuple(
            (number, peak * schedule.factor(applied_steps))
            for number, schedule in enumerate(self.schedules)
            if schedule is not None
        )


def plan_optimizer(
    model: nn.Module, record: Optimizer, device: torch.device, ema_decay: float | None = None
) -> OptimizerPlan:
    """Returns the plan of ``record``, decided for ``device``, on the trained parameters of ``model``.

    Weight decay acts on parameters of two dimensions or more that are in no norm, and where a group sets it.

    Raises:
        ConfigError: a pattern of ``groups`` matches no trained parameter, the optimizer refuses its options, or groups
            keep states that cannot lie together.
    """
    patterns = _first_patterns(model, record.groups)
    decayed = decayed_names(model)
    matrices = muon_parameters(model, record) if isinstance(record, Muon) else {}
    rules: dict[str, tuple[Rule, AnySchedule | None]] = {}
    chosen: dict[str, tuple[str, float, float]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        pattern = patterns.get(name)
        changes: Mapping[str, Any] = {} if pattern is None else record.groups[pattern]
        own = replace(record, groups={}) if pattern is None else record.with_changes(pattern)
        if isinstance(own, Muon) and name not in matrices:
            own = own.for_vectors
        schedule = changes.get("schedule")
        decays = name in decayed or "weight_decay" in changes
        shared = own.without_decay()
        key = repr((shared, schedule))
        if key not in rules:
            rule = MuonRule(shared, matrices) if isinstance(shared, Muon) else rule_of(shared, device)
            rules[key] = rule, schedule
        chosen[name] = key, own.decay if decays else 0.0, float(changes.get("lr_factor", 1.0))
    states = {key: tuple(sorted(spec.name for spec in rule.states)) for key, (rule, _) in rules.items()}
    order = _adjacent({*states.values()})
    ordered = sorted(rules, key=lambda key: order.index(states[key]))
    classes = {
        name: UpdateClass(ordered.index(key), weight_decay, lr_factor)
        for name, (key, weight_decay, lr_factor) in chosen.items()
    }
    distinct = sorted(set(classes.values()), key=lambda c: (c.rule, not c.weight_decay, c.weight_decay, c.lr_factor))
    return OptimizerPlan(
        rules=tuple(rules[key][0] for key in ordered),
        schedules=tuple(rules[key][1] for key in ordered),
        classes=tuple(distinct),
        numbers={name: distinct.index(update_class) for name, update_class in classes.items()},
        record=record,
        ema_decay=ema_decay,
    )


def _adjacent(combinations: Collection[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Returns combinations of states in an order in which those with one state are adjacent.

    So the parameters that have a state are adjacent in every flat buffer, where one tensor holds it.

    Raises:
        ConfigError: no order does this.
    """
    kinds = {kind for own in combinations for kind in own}
    for order in permutations(sorted(combinations)):
        if all(sum(has for has, _ in groupby(kind in own for own in order)) <= 1 for kind in kinds):
            return order
    listed = "; ".join(", ".join(own) or "none" for own in sorted(combinations))
    raise ConfigError(
        f"groups choose optimizers with these states: {listed}; no order of them keeps each state together, so let "
        f"more groups keep the same states"
    )


def _first_patterns(model: nn.Module, patterns: Sequence[str] | Mapping[str, Any]) -> dict[str, str]:
    """Returns the first of ``patterns`` that matches each trained parameter, by its name."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    first: dict[str, str] = {}
    for pattern in patterns:
        found = matching_parameters(model, [pattern], "groups") & trained
        if not found:
            raise ConfigError(f"groups pattern '{pattern}' matches frozen parameters only; remove it")
        first |= {name: pattern for name in found if name not in first}
    return first
