"""Parameter groups: which parameters are sharded together, in which order, and with or without weight decay."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from dtrain.errors import ConfigError, ModelError, nearest
from dtrain.precision.fake import address
from dtrain.precision.rules import fp32_class

CONTAINERS = (nn.ModuleList, nn.Sequential)
"""Modules whose elements are units of sharding by default."""


@dataclass(frozen=True)
class ParamGroup:
    """One unit of sharding: the name of its module, empty for the root group, and its trained or frozen parameters."""

    name: str
    parameters: tuple[tuple[str, nn.Parameter], ...]


def find_groups(
    model: nn.Module, sharding_units: str | Sequence[str] = "auto", *, frozen: bool = False
) -> tuple[ParamGroup, ...]:
    """Returns the parameter groups of ``model`` in definition order; the root group comes first, if it has parameters.

    Args:
        model: the model.
        sharding_units: ``auto``: each element of an outermost ``ModuleList`` or ``Sequential``; or name patterns
            (``fnmatch``) of modules. Parameters that no unit holds or that two units share are in the root group.
        frozen: group the frozen parameters instead of the trained ones.

    Raises:
        ConfigError: a pattern matches no module.
    """
    chosen = [(name, p) for name, p in model.named_parameters() if p.requires_grad is not frozen]
    # a parameter counts for each of its names, so that one that two units share has two owners
    units = find_units(model, sharding_units)
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(_unit_of(name, units))
    members: dict[str, list[tuple[str, nn.Parameter]]] = {"": [], **{unit: [] for unit in units}}
    for name, parameter in chosen:
        own = owners[id(parameter)]
        members[next(iter(own)) if len(own) == 1 else ""].append((name, parameter))
    return tuple(ParamGroup(unit, tuple(found)) for unit, found in members.items() if found)


def move_to_root(groups: Sequence[ParamGroup], names: Collection[str]) -> tuple[ParamGroup, ...]:
    """Returns the groups with the parameters called ``names`` moved to the root group."""
    moved = [(name, p) for group in groups for name, p in group.parameters if name in names or not group.name]
    rest = [
        ParamGroup(group.name, tuple((name, p) for name, p in group.parameters if name not in names))
        for group in groups
        if group.name
    ]
    return tuple(group for group in (ParamGroup("", tuple(moved)), *rest) if group.parameters)


def backward_order(groups: Sequence[ParamGroup]) -> list[int]:
    """Returns the indices of ``groups`` in the order in which backward completes their gradients.

    Backward reaches the groups in reverse. The root group comes last: it holds what lies outside all units, such as the
    embedding, and what several units share, whose gradients are complete only after the first unit's backward.
    """
    return sorted(range(len(groups)), key=lambda index: (groups[index].name == "", -index))


def backward_names(groups: Sequence[ParamGroup]) -> list[str]:
    """Returns the names of all parameters, about in the order in which backward reaches them."""
    return [name for index in backward_order(groups) for name, _ in reversed(groups[index].parameters)]


def decayed_names(model: nn.Module) -> set[str]:
    """Returns the trainable parameters that weight decay acts on: of two dimensions or more, and not in a norm."""
    # by identity, because a tied parameter has several names
    norms = {
        id(p) for module in model.modules() if fp32_class(module) == "norm" for p in module.parameters(recurse=False)
    }
    return {name for name, p in model.named_parameters() if p.requires_grad and p.dim() > 1 and id(p) not in norms}


def matching_parameters(model: nn.Module, patterns: Sequence[str], setting: str) -> set[str]:
    """Returns the parameters that ``patterns`` (``fnmatch``), those of ``setting``, name, or whose modules they name.

    Raises:
        ConfigError: a pattern matches neither a module nor a parameter.
    """
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    kept = {id(p): name for name, p in model.named_parameters()}
    parameters = {name: kept[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    return matching_names(modules, parameters, patterns, setting)


def matching_names(
    modules: Iterable[str], parameters: Mapping[str, str], patterns: Sequence[str], setting: str
) -> set[str]:
    """Does what ``matching_parameters`` does, for modules of these names and parameters {any name: its first}."""
    modules = [name for name in modules if name]
    found: set[str] = set()
    for pattern in patterns:
        inside = tuple(f"{name}." for name in fnmatch.filter(modules, pattern))
        names = {*fnmatch.filter(parameters, pattern), *(name for name in parameters if name.startswith(inside))}
        if not names:
            raise ConfigError(
                f"{setting} pattern '{pattern}' matches no parameter and no module that has one"
                f"{nearest(pattern, [*modules, *parameters])}"
            )
        found |= {parameters[name] for name in names}
    return found


def aliases(model: nn.Module) -> dict[str, str]:
    """Returns {second name of a tied parameter: the name under which it is stored}."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # named_parameters() without duplicates yields the first name, which masters and checkpoints use
        kept = first.setdefault(id(parameter), name)
        if kept != name:
            found[name] = kept
    return found


def _unit_of(name: str, units: Sequence[str]) -> str:
    return next((unit for unit in units if name.startswith(f"{unit}.")), "")


def _auto_units(model: nn.Module) -> list[str]:
    units: list[str] = []

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if isinstance(module, CONTAINERS):  # not deeper: only the outermost container gives units
                units.append(path)
            else:
                visit(child, f"{path}.")

    visit(model, "")
    return units


def find_units(model: nn.Module, patterns: str | Sequence[str], setting: str = "sharding_units") -> list[str]:
    """Returns the names of the modules that are sharded as units, see ``find_groups``.

    Args:
        setting: name of the setting of ``patterns`` in messages.
    """
    if patterns == "auto":
        return _auto_units(model)
    names = [name for name, _ in model.named_modules() if name]
    matched: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            raise ConfigError(f"{setting} pattern '{pattern}' matches no module{nearest(pattern, names)}")
        matched += found
    # a unit inside another one would share its parameters, so the outer one wins
    return [name for name in names if name in matched and not _unit_of(name, matched)]


def check_overlaps(model: nn.Module) -> None:
    """Raises ``ModelError`` if two different parameters share memory, also in part."""
    extents = []  # flattening would untie parameters that overlap in memory
    for name, p in model.named_parameters():
        if p.numel():
            reach = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True)) + 1
            start = address(p)
            extents.append((start, start + reach * p.element_size(), name))
    end, name = 0, ""
    for start, stop, other in sorted(extents):  # by address, so only neighbors can overlap
        if start < end:
            raise ModelError(
                f"'{name}' and '{other}' are two parameters over one storage; tie them by assigning the Parameter "
                f"itself (a.weight = b.weight), so that both names stand for one tensor"
            )
        end, name = stop, other


def callable_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yields ``module``, or, if it has no forward (a ``ModuleList``), the modules in it that have one."""
    if type(module).forward is not nn.Module.forward:
        yield module
    else:
        for child in module.children():
            yield from callable_parts(child)
