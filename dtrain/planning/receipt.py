"""Plans the run of ``dtrain train``, for its receipt and for advice if memory runs out.

The imports are in the functions, so a run without a plan does not pay for them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from dtrain.config.schema import RunConfig
    from dtrain.data import Dataset
    from dtrain.engine.interface import Engine
    from dtrain.planning.planned_run import PlannedRun
    from dtrain.train.receipt import Receipt


class RunPlanner:
    """Plans the run of this machine; a :class:`dtrain.train.receipt.Planner`."""

    def receipt(
        self, config: RunConfig, engine: Engine, dataset: Dataset, *, peak: int | None, step_ms: float | None
    ) -> Receipt:
        from dtrain.errors import ConfigError
        from dtrain.planning.memory.plan import memory_of
        from dtrain.planning.memory.show import receipt_of
        from dtrain.planning.time.prediction import Assumptions, PricedRun

        run = _planned_here(config, engine.device, engine.world_size, dataset)
        has_rates = run.device.type == "cuda" and run.device.bandwidth is not None
        recorded = run.record(for_time=has_rates)
        receipt = receipt_of(memory_of(recorded), engine.memory(), peak)
        if has_rates and step_ms is not None:
            with suppress(ConfigError):  # no rate of the format is published
                planned = PricedRun.of(recorded, Assumptions.efficiency).predict(Assumptions())
                note = f"a step: {1e3 * planned.step.seconds:.4g} ms planned, {step_ms:.4g} ms measured"
                return replace(receipt, notes=[*receipt.notes, note])
        return receipt

    def advice(self, config: RunConfig, device: torch.device, num_ranks: int) -> list[str]:
        from dtrain.planning.memory.show import plan_lines

        return plan_lines(_planned_here(config, device, num_ranks))


def _planned_here(
    config: RunConfig, device: torch.device, num_ranks: int, dataset: Dataset | None = None
) -> PlannedRun:
    from dtrain.distributed.startup.launch_env import LaunchEnv
    from dtrain.planning.devices import HERE, find_device
    from dtrain.planning.planned_run import PlannedRun

    name = HERE if device.type == "cuda" else "cpu"
    return PlannedRun.of(config, find_device(name, LaunchEnv.read().local_world_size), num_ranks, dataset)
