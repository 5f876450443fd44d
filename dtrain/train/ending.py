"""The last acts of a run, which must not fail it: the receipt of its memory, and the reason if its memory ran out."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from dtrain.config.schema import RunConfig
from dtrain.data import Dataset
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.consensus import describe
from dtrain.distributed.logging import logger
from dtrain.engine.interface import Engine
from dtrain.errors import OutOfMemoryError
from dtrain.telemetry.report.page import REPORT_FILE, write_report
from dtrain.train.receipt import Measured, Planner, is_out_of_memory
from dtrain.train.run_dir import RunDir


def write_receipt(
    planner: Planner, config: RunConfig, engine: Engine, dataset: Dataset, run_dir: RunDir, measured: Measured
) -> None:
    """Writes ``memory.json`` and logs it: what rank 0 was planned to need, and what it took."""
    try:
        receipt = planner.receipt(config, engine, dataset, measured)
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
def explained_out_of_memory(config: RunConfig, comm: Communicator, planner: Planner | None) -> Iterator[None]:
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
    if not what:
        return
    gc.collect()
    lines = [f"out of memory: rank {comm.rank}: {what}"]
    if planner is not None:
        try:
            lines += planner.advice(config, comm.device, comm.world_size)
        except Exception as error:  # the plan must not hide the failure that it explains
            lines.append(f"no plan of the memory: {describe(error)}")
    raise OutOfMemoryError("\n".join(lines))
