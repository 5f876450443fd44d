"""Finds which engines' parameters a loss depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dtrain.integrations.driver import EngineDriver


def trained_by(loss: Any, drivers: Sequence[EngineDriver]) -> list[EngineDriver]:
    """Returns those of ``drivers`` whose parameters the graph of ``loss`` reaches."""
    owners = {id(p): driver for driver in drivers for p in driver.engine.module.parameters()}
    found: dict[int, EngineDriver] = {}
    start = loss.grad_fn if isinstance(loss, Tensor) else None
    pending, seen = [start], {start}
    while pending and len(found) < len(drivers):
        node = pending.pop()
        if node is None:
            continue
        owner = owners.get(id(getattr(node, "variable", None)))
        if owner is not None:
            found[id(owner)] = owner
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                pending.append(following)
    return list(found.values())
