"""Acts around a run, which must not fail it: its plan, its receipt, its page, and the reason if its memory ran out.

The planner, which says what the run is planned to need, is handed in by the command line.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

from dtrain.config.schema import RunConfig
from dtrain.data import Dataset
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.consensus import describe
from dtrain.distributed.logging import logger
from dtrain.engine.interface import Engine
from dtrain.errors import ConfigError, OutOfMemoryError
from dtrain.telemetry.metrics import write_json
from dtrain.telemetry.report.page import REPORT_FILE, write_report
from dtrain.telemetry.texts import bytes_range, bytes_text

MEMORY_FILE = "memory.json"
STEP, PEAK = "step", "peak"


class Planner(Protocol):
    """Plans runs; ``dtrain.planning.plans.RunPlanner`` is the one of the command line."""

    def receipt(
        self, config: RunConfig, engine: Engine, dataset: Dataset, *, peak: int | None, step_ms: float | None
    ) -> Receipt:
        """Returns what the run of ``engine`` was planned to need, beside what it took.

        That is ``peak``, bytes of rank 0, and ``step_ms``, the mean of a step; None: not known.
        """

    def float8_line(self, config: RunConfig, engine: Engine, dataset: Dataset) -> str:
        """Returns what FP8 is expected to bring to the run of ``engine``, which has FP8 modules."""

    def advice(self, config: RunConfig, device: torch.device, num_ranks: int) -> list[str]:
        """Returns the planned memory of a run on this machine, and changes that make it fit, as lines of text."""


@dataclass(frozen=True)
class ReceiptRow:
    """Bytes of one kind: planned between two bounds, and measured, if that is possible."""

    kind: str
    planned_low: int
    planned_high: int
    measured: int | None

    def texts(self) -> tuple[str, str]:
        """Returns the planned and the measured bytes, for people."""
        measured = "-" if self.measured is None else bytes_text(self.measured)
        return bytes_range(self.planned_low, self.planned_high), measured

    def deviation(self) -> str:
        """Returns how far the measured bytes are outside of the planned bounds, for people."""
        if self.measured is None:
            return "not measured"
        nearest = min(max(self.measured, self.planned_low), self.planned_high)
        return (
            "as planned" if nearest == self.measured else f"{100 * (self.measured - nearest) / max(nearest, 1):+.1f} %"
        )


@dataclass(frozen=True)
class Receipt:
    """What a run was planned to need on rank 0, and what it took.

    Attributes:
        rows: of the kinds between steps, then ``step``, what a step takes in addition, and ``peak``, their sum.
        notes: what the plan takes otherwise than the run, a sentence each.
        device: name of the planned device.
    """

    rows: Sequence[ReceiptRow]
    notes: Sequence[str]
    device: str
    num_ranks: int

    @staticmethod
    def read(run_dir: Path) -> Receipt:
        """Returns the receipt of a run; raises ``ConfigError`` if it has none."""
        path = run_dir / MEMORY_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return Receipt(**{**values, "rows": [ReceiptRow(**row) for row in values["rows"]]})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path}: expected the {MEMORY_FILE} that a run writes at its end with report=true; got "
                f"{type(error).__name__}: {error}"
            ) from None


def write_receipt(run_dir: Path, compare: Callable[[], Receipt]) -> None:
    """Writes ``memory.json``, the receipt that ``compare`` returns, and logs it."""
    with _logged("no plan of the memory to compare with"):  # perhaps because of a user's model
        receipt = compare()
        write_json(run_dir / MEMORY_FILE, asdict(receipt), indent=2)
        rows = [(row.kind, *row.texts()) for row in receipt.rows]
        for kind, planned, measured in [("of rank 0", "planned", "measured"), *rows]:
            logger.info(f"memory {kind:<16} {planned:>24} {measured:>12}")


def log_float8_line(line: Callable[[], str]) -> None:
    """Logs what FP8 is expected to bring; a plan that fails is a warning."""
    with _logged("no plan of what FP8 brings"):
        logger.info(line())


def write_page(run_dir: Path) -> None:
    """Writes ``report.html``."""
    with _logged(f"no {REPORT_FILE}"):
        write_report([run_dir], run_dir / REPORT_FILE)


@contextmanager
def _logged(failure: str) -> Iterator[None]:
    """Logs an error in the block as a ``failure``, which does not concern what the run trains or saves."""
    try:
        yield
    except Exception as error:
        logger.warning("%s: %s", failure, describe(error))


@contextmanager
def explained_out_of_memory(config: RunConfig, comm: Communicator, planner: Planner | None) -> Iterator[None]:
    """Turns a failed allocation in the block into an error that shows the plan, and changes that make the run fit."""
    try:
        yield
        return
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        what = (str(error).strip() or type(error).__name__).splitlines()[0]
        # its frames hold the engine and what backward needs, which the plan may need the room of
        error.__traceback__ = error.__context__ = error.__cause__ = None
    gc.collect()
    lines = [f"out of memory: rank {comm.rank}: {what}"]
    if planner is not None:
        try:
            lines += planner.advice(config, comm.device, comm.world_size)
        except Exception as error:  # the plan must not hide the failure that it explains
            lines.append(f"no plan of the memory: {describe(error)}")
    raise OutOfMemoryError("\n".join(lines))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that an allocation of a tensor has failed."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
