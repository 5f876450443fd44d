"""The run that a command line of ``dtrain plan`` or ``dtrain simulate`` describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dtrain.errors import ConfigError

if TYPE_CHECKING:
    from dtrain.config.schema import RunConfig
    from dtrain.train.planned import PlannedRun


def asked_ranks(keys: Mapping[str, str]) -> int | None:
    """Returns the value of ``ranks=``, if it is given."""
    return whole_number("ranks", keys["ranks"]) if "ranks" in keys else None


def planned_run(config: RunConfig, keys: Mapping[str, str]) -> PlannedRun:
    """Returns the run of ``config`` on the device and the ranks that ``keys`` name: ``device=``, ``ranks=``."""
    from dtrain.distributed.startup.launch_env import LaunchEnv
    from dtrain.distributed.startup.setup import choose_device, processes_to_start
    from dtrain.planning.devices import HERE, find_device
    from dtrain.train.planned import PlannedRun
    from dtrain.train.run import check_run
    from dtrain.train.setup import check_precision

    name = keys.get("device", "cpu" if config.launch.device == "cpu" else HERE)
    started = LaunchEnv.read().world_size * processes_to_start(config.launch.num_processes, config.launch.device)
    ranks = asked_ranks(keys) or started
    device = find_device(name, ranks)
    check_run(config)
    if device.is_here:
        check_precision(config, choose_device(device.type, 0))
    if len(config.batch_growth.phases) > 1:
        largest = config.batch_growth.largest
        sizes = f"train.global_batch_size={largest.global_batch_size} train.seq_len={largest.seq_len}"
        print(f"planned at the largest batch: {sizes}\n")
        config = config.at_largest_batch()
    return PlannedRun.of(_with_whole_batch(config, ranks), device, ranks)


def whole_number(key: str, text: str) -> int:
    """Returns the value of ``key``; raises ``ConfigError`` if it is no whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{key}={text} must be a whole number from 1")
    return int(text)


def _with_whole_batch(config: RunConfig, ranks: int) -> RunConfig:
    """Returns ``config`` with a global batch that the ranks can share."""
    train = config.train
    unit = train.micro_batch_size * ranks
    whole = -(-train.global_batch_size // unit) * unit
    if whole == train.global_batch_size:
        return config
    shared = f"{ranks} ranks cannot share {train.global_batch_size} in equal parts"
    print(f"planned with train.global_batch_size={whole}: {shared}\n")
    return replace(config, train=replace(train, global_batch_size=whole))
