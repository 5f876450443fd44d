"""Assigns the modules and parameters of a model to calls of ``fully_shard``.

A unit gathers its weights in one dtype and shards along the first dimension. Parameters that do not fit are replicated:
norms and other FP32 weights of a low-precision policy, unless they are large enough for a unit of their own; parameters
without dimensions or elements; and one that two units share, which belongs to neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from dtrain.parameters.groups import ParamGroup, callable_parts
from dtrain.precision.contract import Contract

LARGE_NUMEL = 1 << 20
"""Elements from which FP32 modules in low-precision units are sharded, at the price of collectives of their own:
replicated they would take 16 bytes an element on each rank (master, two moments, main grad)."""


@dataclass
class Unit:
    """One call of ``fully_shard``.

    Attributes:
        name: of its module; empty for the model.
        module: its call gathers the parameters.
        dtype: compute dtype of the parameters.
        parameters: by name, in the order in which ``fully_shard`` lays them out.
    """

    name: str
    module: nn.Module
    dtype: torch.dtype = torch.float32
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def shapes(self) -> list[torch.Size]:
        return [parameter.shape for parameter in self.parameters.values()]


@dataclass(frozen=True)
class UnitPlan:
    """The units, inner ones first and the model itself last, and the replicated parameters by name."""

    units: tuple[Unit, ...]
    replicated: dict[str, nn.Parameter]


def plan_units(model: nn.Module, groups: Sequence[ParamGroup], contract: Contract) -> UnitPlan:
    """Assigns every trainable parameter to a unit or to the replicated ones.

    Args:
        model: not sharded yet.
        groups: of ``dtrain.parameters.groups.find_groups``.
        contract: the dtype of each parameter.
    """
    modules = {
        id(part): part for group in groups if group.name for part in callable_parts(model.get_submodule(group.name))
    }
    # inner modules first, because fully_shard leaves out what an inner call has taken
    nested = _large_fp32_modules(model, list(modules.values()), contract)
    names = {id(module): name for name, module in model.named_modules()}
    chosen = {id(module): module for module in (*nested, *modules.values(), model)}
    units = [Unit(names[key], module) for key, module in chosen.items()]
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    seen_by: dict[int, list[Unit]] = {}
    for unit in units:
        for p in dict.fromkeys(_visible(unit.module, chosen)):
            seen_by.setdefault(id(p), []).append(unit)
    root = units[-1]  # the model comes last in chosen
    replicated: dict[str, nn.Parameter] = {}
    for unit in units:
        for p in dict.fromkeys(_visible(unit.module, chosen)):
            own = seen_by[id(p)]
            # what the root sees too is the root's, which gathers before every unit
            if id(p) not in trainable or (unit is not root and root in own):
                continue
            name = trainable[id(p)]
            # fully_shard splits the first dimension, and two units would each gather a shared parameter
            if p.dim() == 0 or not p.numel() or (unit is not root and len(own) > 1):
                replicated[name] = p
            else:
                unit.parameters[name] = p
    is_reduced_precision, dtypes = contract.policy.is_reduced_precision, contract.replica_dtypes
    for unit in units:
        # fully_shard casts a whole unit to one dtype
        fp32_names = [name for name in unit.parameters if dtypes[name] == torch.float32]
        if len(fp32_names) < len(unit.parameters):
            unit.dtype = contract.policy.compute_dtype
        elif not is_reduced_precision or sum(p.numel() for p in unit.parameters.values()) >= LARGE_NUMEL:
            continue
        for name in fp32_names:
            replicated[name] = unit.parameters.pop(name)
    in_order = (name for name in trainable.values() if name in replicated)
    return UnitPlan(
        tuple(unit for unit in units if unit.parameters or unit is root), {name: replicated[name] for name in in_order}
    )


def _large_fp32_modules(model: nn.Module, units: Sequence[nn.Module], contract: Contract) -> list[nn.Module]:
    """Returns the large outermost FP32 modules in units with low-precision weights; inner ones first."""
    if not contract.policy.is_reduced_precision:
        return []
    whole = {id(module) for module in (*units, model)}
    fp32_modules: list[nn.Module] = []
    outermost: list[str] = []
    for name in contract.fp32_modules:
        if any(name.startswith(f"{outer}." if outer else "") for outer in outermost):
            continue
        outermost.append(name)
        for part in callable_parts(model.get_submodule(name)):
            numel = sum(p.numel() for p in part.parameters() if p.requires_grad)
            if numel >= LARGE_NUMEL and not any(id(module) in whole for module in part.modules()):
                fp32_modules.append(part)
    return fp32_modules


def _visible(module: nn.Module, units: dict[int, nn.Module]) -> Iterator[nn.Parameter]:
    """Yields the parameters that ``fully_shard(module)`` finds, in its order: children first, without inner units."""
    seen: set[int] = set()

    def visit(inner: nn.Module) -> Iterator[nn.Parameter]:
        seen.add(id(inner))
        for child in inner.children():
            if id(child) not in seen and id(child) not in units:
                yield from visit(child)
        yield from inner.parameters(recurse=False)

    yield from visit(module)
