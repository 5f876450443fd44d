"""Finds the engine that the backward of a loss updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from dtrain.errors import UsageError
from dtrain.integrations.driver import EngineDriver


def driver_of(loss: Any, model: nn.Module | None, drivers: Sequence[EngineDriver]) -> EngineDriver:
    """Returns the driver of ``model``, or else the only one of ``drivers`` whose parameters ``loss`` depends on.

    Raises:
        UsageError: there is none, or there are several.
    """
    if model is not None:
        drivers = [driver for driver in drivers if driver is getattr(model, "driver", None)]
    elif len(drivers) > 1:
        drivers = _trained_by(loss, drivers)
    if len(drivers) == 1:
        return drivers[0]
    if drivers:
        raise UsageError(
            f"the loss depends on the parameters of {len(drivers)} prepared models, and a backward updates one; say "
            f"which: accelerator.backward(loss, model=model), or freeze the others around it"
        )
    raise UsageError(
        "accelerator.backward: the loss depends on no model that was prepared with its optimizer; call "
        "accelerator.prepare(model, optimizer)"
    )


def _trained_by(loss: Any, drivers: Sequence[EngineDriver]) -> list[EngineDriver]:
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
