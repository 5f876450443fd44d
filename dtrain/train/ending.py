"""The last acts of a run, which must not fail it: the receipt of its memory, and the reason if its memory ran out."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dtrain.config.schema import RunConfig
from dtrain.data import Dataset
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.consensus import describe
from dtrain.distributed.logging import logger
from dtrain.distributed.startup.launch_env import LaunchEnv
from dtrain.engine.interface import Engine
from dtrain.planning.devices import HERE, find_device
from dtrain.telemetry.report.page import REPORT_FILE, write_report
from dtrain.train.memory.plan import plan_memory
from dtrain.train.memory.receipt import Receipt, is_out_of_memory, out_of_memory
from dtrain.train.planned import PlannedRun
from dtrain.train.run_dir import RunDir


def planned_here(config: RunConfig, device: torch.device, num_ranks: int, dataset: Dataset | None = None) -> PlannedRun:
    """Returns the plan of a run on this machine."""
    name = HERE if device.type == "cuda" else "cpu"
    return PlannedRun.of(config, find_device(name, LaunchEnv.read().local_world_size), num_ranks, dataset)


def write_receipt(config: RunConfig, engine: Engine, dataset: Dataset, run_dir: RunDir, peak: int | None) -> None:
    """Writes ``memory.json`` and logs it: what rank 0 was planned to need, and ``peak``, the bytes that it took."""
    try:
        plan = plan_memory(planned_here(config, engine.device, engine.world_size, dataset))
        receipt = Receipt.of(plan, engine.memory(), peak)
        receipt.write(run_dir.path)
    except Exception as error:  # perhaps of a user's model; the run is finished and saved
        logger.warning("no plan of the memory to compare with: %s", describe(error))
        return
    for line in receipt.lines():
        logger.info(line)


def write_page(run_dir: RunDir) -> None:
    """Writes ``report.html``."""
    try:
        write_report([run_dir.path], run_dir.path / REPORT_FILE)
    except Exception as error:  # the run is finished and saved
        logger.warning("no %s: %s", REPORT_FILE, describe(error))


@contextmanager
def explained_out_of_memory(config: RunConfig, comm: Communicator) -> Iterator[None]:
    """Turns a failed allocation in the block into an error that shows the plan, and changes that make the run fit."""
    what = ""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        what = (str(error).strip() or type(error).__name__).splitlines()[0]
        # its frames hold the engine and what backward needs, which the plan may need the room of
        error.__traceback__ = error.__context__ = error.__cause__ = None
    if what:
        gc.collect()
        raise out_of_memory(planned_here(config, comm.device, comm.world_size), f"rank {comm.rank}: {what}")
