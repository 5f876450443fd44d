"""Converts an optimizer of torch to dtrain's record of the same update, with its parameter groups and their rates."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config.optim import SGD, Adam, AdamW, Optimizer, TorchOptimizer
from dtrain.errors import ConfigError, UsageError
from dtrain.integrations.patterns import patterns_of
from dtrain.parameters.groups import decayed_names

_IMPLEMENTATION = ("foreach", "fused")
"""Options that choose an implementation of the same update, which dtrain chooses itself."""

_REFUSED = {
    "capturable": "dtrain captures no optimizer step in a CUDA graph",
    "differentiable": "dtrain's update records no graph",
}


@dataclass(frozen=True)
class _Group:
    """A parameter group: its factor of the learning rate, its other hyper-parameters, its trained parameters' names."""

    lr_factor: float
    options: Mapping[str, Any]
    names: Sequence[str]


def record_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> Optimizer:
    """Returns the record with which dtrain updates the parameters of ``model`` as ``optimizer`` does.

    ``AdamW``, ``Adam`` and ``SGD`` of torch become dtrain's own records where these have every hyper-parameter, and
    ``dtrain.TorchOptimizer`` otherwise, as any other class does. The learning rate is the largest initial one of
    the parameter groups. Parameters whose learning rate or other hyper-parameters are not those that the record gives
    them by itself are in its ``groups``, by name.

    Args:
        optimizer: one that has not taken a step.
        model: holds all of its parameters; all that are trained are in ``optimizer``.

    Raises:
        ConfigError: the optimizer has a state, a hook or an option that cannot be kept, or other parameters.
    """
    _check_unused(optimizer)
    rates = GroupRates(optimizer)
    names = _names_by_group(optimizer, model)
    options = [_options(optimizer, group) for group in optimizer.param_groups]
    own = _own_records(optimizer, options)
    if own is None:
        taken = inspect.signature(type(optimizer)).parameters
        settings = [{key: value for key, value in one.items() if key in taken} for one in options]
    else:
        settings = [fields for _, fields in own]
    groups = [_Group(*group) for group in zip(rates.factors, settings, names, strict=True)]
    # the settings of most elements are the record's own, so that few names are listed
    parameters = dict(model.named_parameters())
    base = max(groups, key=lambda group: sum(parameters[name].numel() for name in group.names))
    changes = patterns_of(_changes(groups, base.options, decayed_names(model)), model)
    if own is None:
        return TorchOptimizer(type(optimizer), rates.base, options=base.options, groups=changes)
    return own[0][0](lr=rates.base, groups=changes, **base.options)


def _check_unused(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if all(callable(getattr(optimizer, method, None)) for method in ("train", "eval")):
        raise ConfigError(
            f"the {name} has methods train() and eval(), which exchange the weights for others, as schedule-free "
            f"optimizers do; dtrain keeps sharded masters and calls neither. Use one of torch with a schedule, or "
            f"ema_decay=0.999 for averages: with model.engine.ema():"
        )
    # some classes make their states when they are built, with a step of 0
    if any(state and float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise ConfigError(
            f"the {name} has taken steps, and dtrain keeps optimizer states of its own; prepare it before its first "
            f"step, and resume by accelerator.load_state"
        )
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    if any(getattr(optimizer, attribute, None) for attribute in hooks):
        raise ConfigError(
            f"the {name} has a step hook, which dtrain would not call, because it updates the sharded masters itself; "
            f"remove the hook and call its function after optimizer.step()"
        )
    for group in optimizer.param_groups:
        for option, reason in _REFUSED.items():
            if group.get(option):
                raise ConfigError(f"{name}({option}=True) cannot be kept: {reason}; leave it out")


def _options(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyper-parameters of ``group`` but for the learning rate; a scheduler's entries are none."""
    left_out = {"lr", *_IMPLEMENTATION, *_REFUSED}
    return {key: _plain(group[key]) for key in optimizer.defaults if key not in left_out and key in group}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _names_by_group(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Returns the names of the trained parameters of each group."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    kind = type(model).__name__
    for number, group in enumerate(optimizer.param_groups):
        if any(id(parameter) not in known for parameter in group["params"]):
            raise ConfigError(
                f"group {number} of the {type(optimizer).__name__} has a parameter that is not in the {kind}; one "
                f"optimizer updates the parameters of one model"
            )
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in given:
            raise ConfigError(
                f"parameter '{name}' of the {kind} is in no group of the {type(optimizer).__name__}, and dtrain trains "
                f"every parameter that requires a gradient; add it, or freeze it: requires_grad_(False)"
            )
    return [[known[id(p)] for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]


def _own_records(
    optimizer: torch.optim.Optimizer, options: Sequence[Mapping[str, Any]]
) -> list[tuple[type[Optimizer], dict[str, Any]]] | None:
    """Returns the record and its fields for each group, or None if no record of dtrain can hold them all."""
    found = [_own_record(type(optimizer), one) for one in options]
    first = found[0]
    if first is None:
        return None
    shared = {item.name for item in fields(first[0])} - set(first[0].group_keys)
    for one in found:
        if one is None or one[0] is not first[0] or any(one[1][key] != first[1][key] for key in shared & one[1].keys()):
            return None
    return [one for one in found if one is not None]


def _own_record(kind: type, options: Mapping[str, Any]) -> tuple[type[Optimizer], dict[str, Any]] | None:
    if options.get("maximize") or options.get("amsgrad") or options.get("dampening"):
        return None
    if kind in (torch.optim.AdamW, torch.optim.Adam):
        record = AdamW if options.get("decoupled_weight_decay", kind is torch.optim.AdamW) else Adam
        return record, {key: options[key] for key in ("betas", "eps", "weight_decay")}
    if kind is torch.optim.SGD:
        return SGD, {key: options[key] for key in ("momentum", "nesterov", "weight_decay")}
    return None


def _changes(groups: Sequence[_Group], base: Mapping[str, Any], decayed: Collection[str]) -> dict[str, dict[str, Any]]:
    """Returns, by name, what differs from the settings that a record with the fields ``base`` gives a parameter."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        for name in group.names:
            default = dict(base)
            if "weight_decay" in default and name not in decayed:
                default["weight_decay"] = 0.0
            changes = {key: value for key, value in group.options.items() if default.get(key) != value}
            if group.lr_factor != 1.0:
                changes["lr_factor"] = group.lr_factor
            if changes:
                found[name] = changes
    return found


class GroupRates:
    """The learning rates of an optimizer's parameter groups, whose ratios must stay as they were at the start.

    Args:
        optimizer: of torch; a scheduler may have changed its learning rates already.

    Attributes:
        base: the largest initial learning rate.
        factors: that of each group as a multiple of it; 1 if all are 0.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        initial = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self.base = max(initial)
        self.factors = tuple(lr / self.base if self.base else 1.0 for lr in initial)
        self._reference = initial.index(self.base)
        self._kept = self._others()

    def _others(self) -> list[dict[str, Any]]:
        return [_options(self._optimizer, group) for group in self._optimizer.param_groups]

    def current(self) -> float:
        """Returns the learning rate now, of which that of each group is its factor.

        Raises:
            UsageError: the ratio of two groups, or another hyper-parameter, is no longer that of the start.
        """
        lrs = [float(group["lr"]) for group in self._optimizer.param_groups]
        if len(lrs) != len(self.factors):
            raise UsageError(
                f"the optimizer has {len(lrs)} parameter groups and had {len(self.factors)} when it was prepared; add "
                f"groups before accelerator.prepare"
            )
        lr = lrs[self._reference]
        for number, (own, factor) in enumerate(zip(lrs, self.factors, strict=True)):
            if abs(own - factor * lr) > 1e-6 * abs(own):
                raise UsageError(
                    f"the learning rate of parameter group {number} is {own:g}, {factor:g} times {lr:g} was expected: "
                    f"the ratios of the groups' learning rates are those of their first values; give one schedule to "
                    f"all groups"
                )
        for number, (now, kept) in enumerate(zip(self._others(), self._kept, strict=True)):
            if now != kept:
                changed = ", ".join(key for key in kept if now.get(key) != kept[key])
                raise UsageError(
                    f"{changed} of parameter group {number} changed after accelerator.prepare, which dtrain's update "
                    f"does not follow; change the learning rate only (a scheduler: cycle_momentum=False)"
                )
        return lr
