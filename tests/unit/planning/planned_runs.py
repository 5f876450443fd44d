"""Plans of runs, from keys of dtrain train."""

from __future__ import annotations

from dtrain.cli.resolve import compose
from dtrain.planning.devices import find_device
from dtrain.planning.planned_run import PlannedRun


def planned_run(*keys: str, device: str = "cpu", ranks: int = 1) -> PlannedRun:
    return PlannedRun.of(compose(["launch.device=cpu", *keys]), find_device(device), ranks)
