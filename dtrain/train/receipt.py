"""What a run was planned to need on rank 0 beside what it took. The planner is handed in by the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

from dtrain.config.schema import RunConfig
from dtrain.data import Dataset
from dtrain.engine.interface import Engine
from dtrain.errors import ConfigError
from dtrain.telemetry.metrics import write_json

MEMORY_FILE = "memory.json"
STEP, PEAK = "step", "peak"


@dataclass(frozen=True)
class Measured:
    """What a run took.

    Attributes:
        peak: bytes of rank 0; None: unknown.
        step_ms: mean milliseconds of a step; None: no step was timed.
    """

    peak: int | None
    step_ms: float | None


class Planner(Protocol):
    """Plans runs; :class:`dtrain.planning.receipt.RunPlanner` is the one of the command line."""

    def receipt(self, config: RunConfig, engine: Engine, dataset: Dataset, measured: Measured) -> Receipt:
        """Returns what the run of ``engine`` was planned to need, beside what it took."""

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


@dataclass(frozen=True)
class Receipt:
    """A plan and what a run took.

    Attributes:
        rows: of the kinds between steps, then ``step``, what a step takes in addition, and ``peak``, their sum.
        notes: what the plan takes otherwise than the run, a sentence each.
        device: name of the planned device.
        num_ranks: of the run.
    """

    rows: Sequence[ReceiptRow]
    notes: Sequence[str]
    device: str
    num_ranks: int

    def lines(self) -> list[str]:
        """Returns the receipt as text for the console."""
        lines = [f"memory {'of rank 0':<16} {'planned':>24} {'measured':>12}"]
        for row in self.rows:
            planned, measured = row.texts()
            lines.append(f"memory {row.kind:<16} {planned:>24} {measured:>12}")
        return lines

    def write(self, run_dir: Path) -> None:
        """Writes ``memory.json``."""
        write_json(run_dir / MEMORY_FILE, asdict(self), indent=2)

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


def bytes_text(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if abs(nbytes) >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


def bytes_range(low: int, high: int) -> str:
    return bytes_text(low) if low == high else f"{bytes_text(low)} to {bytes_text(high)}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that an allocation of a tensor has failed."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
