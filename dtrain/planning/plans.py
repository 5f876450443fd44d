"""Plans runs: for ``dtrain plan``, and for the receipt of ``dtrain train`` and its advice if memory runs out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from dtrain.config.dump import config_from_dict
from dtrain.config.schema import RunConfig
from dtrain.data import Dataset
from dtrain.distributed.startup.launch_env import LaunchEnv
from dtrain.distributed.startup.setup import choose_device, processes_to_start
from dtrain.engine.interface import Engine
from dtrain.errors import ConfigError
from dtrain.planning.devices import HERE, find_device
from dtrain.planning.memory.plan import memory_of
from dtrain.planning.memory.show import plan_lines, receipt_of, show_against, show_memory
from dtrain.planning.planned_run import PlannedRun
from dtrain.planning.precision import show_plan
from dtrain.planning.record.ranks import NCCL
from dtrain.planning.scale import draw, scale, show_points, to_json
from dtrain.planning.shapes.show import show_shapes
from dtrain.planning.time.float8 import float8_lines
from dtrain.planning.time.prediction import NO_NETWORK, Assumptions, PricedRun
from dtrain.planning.time.show import show_time
from dtrain.telemetry.metrics import CONFIG_FILE
from dtrain.train.receipt import Receipt
from dtrain.train.run import check_run
from dtrain.train.setup import check_precision


def show(plan: str, config: RunConfig, given: Mapping[str, Any]) -> None:
    """Prints ``plan`` of ``config``; ``given`` are values of the keys and options that the plan takes."""
    folded, ranks = "--all" not in given, sorted({*given.get("ranks", [])})
    if plan == "precision":
        device = find_device(given.get("device") or ("cpu" if config.launch.device == "cpu" else HERE))
        modules = show_plan(config, None if device.is_here else device, folded=folded)
        for line in float8_lines(modules, device, lambda: planned_run(config, device.name)) if modules else ():
            print(line)
        return
    for key in ("json", "picture"):
        if key in given and not (folder := Path(given[key]).parent).is_dir():
            raise ConfigError(f"{key}={given[key]}: the folder {folder} does not exist; create it or give another path")
    run = planned_run(config, given.get("device"), *ranks[:1])
    assumed = {field.name: given[field.name] for field in fields(Assumptions) if field.name in given}
    if plan == "memory":
        show_memory(run)
    elif plan == "shapes":
        show_shapes(run, measure="--no-measure" not in given, folded=folded)
    elif plan == "time":
        # of CPU ranks no network is assumed, and they are measured side by side, so the slowest is known
        own = {"network": NO_NETWORK, "spread": 0.0} if run.transport != NCCL else {}
        show_time(run, Assumptions(**{**own, **assumed}))
    else:
        _show_scale(run, ranks, Assumptions(**assumed), given)


def _show_scale(run: PlannedRun, ranks: list[int], assumed: Assumptions, given: Mapping[str, Any]) -> None:
    is_strong = given.get("scaling") == "strong"
    points = scale(run, ranks, assumed, is_strong=is_strong)
    show_points(points, is_strong=is_strong)
    if "json" in given:
        text = json.dumps(to_json(points, is_strong=is_strong), indent=1) + "\n"
        Path(given["json"]).write_text(text, encoding="utf-8")
    if "picture" in given:
        other = scale(run, ranks, assumed, is_strong=not is_strong)
        draw(Path(given["picture"]), {is_strong: points, not is_strong: other})


def show_receipt(folder: Path) -> None:
    """Prints the plan of the run in ``folder`` beside what it has measured."""
    receipt = Receipt.read(folder)
    config = config_from_dict(yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))).parts[-1]
    show_against(receipt, PlannedRun.of(config, find_device(receipt.device, receipt.num_ranks), receipt.num_ranks))


def planned_run(config: RunConfig, device: str | None = None, ranks: int | None = None) -> PlannedRun:
    """Returns the run of ``config`` on the device of this name; by default as this command would start it."""
    launch = config.launch
    ranks = ranks or LaunchEnv.read().world_size * processes_to_start(launch.num_processes, launch.device)
    found = find_device(device or ("cpu" if launch.device == "cpu" else HERE), ranks)
    check_run(config)
    if found.is_here:
        check_precision(config, choose_device(found.type, 0))
    is_growing, config = len(config.batch_growth.phases) > 1, config.at_largest_batch()
    train = config.train
    if is_growing:
        sizes = f"train.global_batch_size={train.global_batch_size} train.seq_len={config.batch_growth.largest.seq_len}"
        print(f"planned at the largest batch: {sizes}\n")
    unit = train.micro_batch_size * ranks
    whole = -(-train.global_batch_size // unit) * unit
    if whole != train.global_batch_size:
        shared = f"{ranks} ranks cannot share {train.global_batch_size} in equal parts"
        print(f"planned with train.global_batch_size={whole}: {shared}\n")
        config = replace(config, train=replace(train, global_batch_size=whole))
    return PlannedRun.of(config, found, ranks)


class RunPlanner:
    """Plans the run of this machine; a ``dtrain.train.receipt.Planner``."""

    def receipt(
        self, config: RunConfig, engine: Engine, dataset: Dataset, *, peak: int | None, step_ms: float | None
    ) -> Receipt:
        run = _here(config, engine.device, engine.world_size, dataset)
        has_rates = run.device.type == "cuda" and run.device.bandwidth is not None
        recorded = run.record(for_time=has_rates)
        receipt = receipt_of(memory_of(recorded), engine.memory(), peak)
        if has_rates and step_ms is not None:
            with suppress(ConfigError):  # no rate of the format is published
                planned = PricedRun.of(recorded, Assumptions.efficiency).predict(Assumptions())
                note = f"a step: {1e3 * planned.step.seconds:.4g} ms planned, {step_ms:.4g} ms measured"
                return replace(receipt, notes=[*receipt.notes, note])
        return receipt

    def float8_line(self, config: RunConfig, engine: Engine, dataset: Dataset) -> str:
        run = _here(config, engine.device, engine.world_size, dataset)
        with torch.random.fork_rng([engine.device] if engine.device.type == "cuda" else []):
            return float8_lines(engine.contract.float8_modules, run.device, lambda: run)[-1]

    def advice(self, config: RunConfig, device: torch.device, num_ranks: int) -> list[str]:
        return plan_lines(_here(config, device, num_ranks))


def _here(config: RunConfig, device: torch.device, num_ranks: int, dataset: Dataset | None = None) -> PlannedRun:
    name = HERE if device.type == "cuda" else "cpu"
    return PlannedRun.of(config, find_device(name, LaunchEnv.read().local_world_size), num_ranks, dataset)
