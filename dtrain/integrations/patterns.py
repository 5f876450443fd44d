"""Name patterns for parameters with the same settings, so that a record lists few of them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

_DEPTH = 2
"""Number of last parts of a name that a pattern may have: ``*.bias``, ``*.norm.weight``."""


def patterns_of(changes: Mapping[str, dict[str, Any]], model: nn.Module) -> dict[str, dict[str, Any]]:
    """Returns ``changes`` by name patterns, which match no other trained parameter.

    If all parameters whose names end alike have the same changes, one pattern stands for them. Each search for a
    pattern visits the whole model, so names alone would take seconds for models with thousands of parameters.

    Args:
        changes: settings of trained parameters, by name.
        model: the model.
    """
    kept = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    # a tied parameter counts under each of its names
    names = {name: kept[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if id(p) in kept}
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    found: dict[str, dict[str, Any]] = {}
    left = dict(changes)
    for depth in range(1, _DEPTH + 1):
        alike: dict[str, list[str]] = {}
        for name, own in names.items():
            parts = name.split(".")
            if len(parts) > depth:
                alike.setdefault(".".join(parts[-depth:]), []).append(own)
        for suffix, members in alike.items():
            pattern, own_changes = f"*.{_escaped(suffix)}", changes.get(members[0])
            is_new = len(members) > 1 and any(name in left for name in members)
            if not is_new or own_changes is None or any(changes.get(name) != own_changes for name in members):
                continue
            if not fnmatch.filter(modules, pattern):  # else it would stand for all parameters of that module
                found[pattern] = own_changes
                left = {name: value for name, value in left.items() if name not in set(members)}
    return found | {_escaped(name): value for name, value in left.items()}


def _escaped(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)
