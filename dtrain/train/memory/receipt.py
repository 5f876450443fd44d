"""What a run was planned to need on rank 0 beside what it took, and the same plan when its memory runs out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dtrain.errors import ConfigError, OutOfMemoryError
from dtrain.telemetry.metrics import write_json
from dtrain.train.memory.changes import cheapest_changes
from dtrain.train.memory.plan import FITS, MemoryPlan, largest_micro_batch, plan_memory
from dtrain.train.planned import PlannedRun

MEMORY_FILE = "memory.json"
STEP, PEAK = "step", "peak"


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
    """Rows of the kinds between steps, then ``step``, what a step takes in addition, and ``peak``, their sum."""

    rows: Sequence[ReceiptRow]
    notes: Sequence[str]
    device: str
    num_ranks: int

    @staticmethod
    def of(plan: MemoryPlan, states: Mapping[str, int], peak: int | None) -> Receipt:
        """Returns the receipt of ``states``, measured by ``engine.memory()``, and of the ``peak``, None if unknown."""
        planned, host = plan.step.states, plan.step.host
        states = {kind: nbytes for kind, nbytes in states.items() if kind not in host}
        kinds = [kind for kind in states if states[kind] or planned.get(kind)]
        rows = [ReceiptRow(kind, planned.get(kind, 0), planned.get(kind, 0), states[kind]) for kind in kinds]
        held, measured = sum(planned.values()), sum(states.values())
        rows.append(ReceiptRow(STEP, plan.low - held, plan.high - held, None if peak is None else peak - measured))
        rows.append(ReceiptRow(PEAK, plan.low, plan.high, peak))
        where = "growth of the resident set" if plan.device.type == "cpu" else "memory of the device"
        note = f"rank 0 of {plan.num_ranks} on {plan.device.name}; the peak is the {where}"
        return Receipt(rows, [note, *plan_notes(plan)], plan.device.name, plan.num_ranks)

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


# -- out of memory -----------------------------------------------------------------------------------------------------


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that an allocation of a tensor has failed."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def out_of_memory(run: PlannedRun, what: str) -> OutOfMemoryError:
    """Returns an error of ``run``: ``what`` the allocator said, the plan, and the changes that make it fit."""
    head = f"out of memory: {what}"
    try:
        return OutOfMemoryError("\n".join([head, *plan_lines(run, plan_memory(run))]))
    except Exception as error:  # the plan must not hide the failure that it explains
        return OutOfMemoryError(f"{head}\nno plan of the memory: {type(error).__name__}: {error}")


def plan_lines(run: PlannedRun, plan: MemoryPlan) -> list[str]:
    """Returns the plan as text: kinds, whether it fits, largest micro-batch, changes."""
    kinds = [f"memory {row.kind:<16} {bytes_range(row.low, row.high):>24}" for row in plan.rows]
    return [*kinds, f"memory {'total':<16} {bytes_range(plan.low, plan.high):>24}", *fit_lines(run, plan)]


def plan_notes(plan: MemoryPlan) -> list[str]:
    """Returns a line about what is offloaded to the host, if anything is, and the notes of the plan."""
    lines, host = [], plan.step.host
    if host:
        kinds = ", ".join(f"{kind} {bytes_text(nbytes)}" for kind, nbytes in host.items())
        lines.append(f"in the memory of the host, for each rank: {bytes_text(sum(host.values()))} ({kinds})")
    return [*lines, *plan.notes]


def fit_lines(run: PlannedRun, plan: MemoryPlan) -> list[str]:
    """Returns whether the run fits, the largest micro-batch that does, and changes if it does not."""
    device = f"{plan.device.name} ({bytes_text(plan.device.memory)} for a rank)"
    own, largest = run.config.train.micro_batch_size, largest_micro_batch(run, plan)
    sizes = f"the largest micro-batch that fits is {largest} (planned: {own})" if largest else "no micro-batch fits"
    lines = [f"{plan.fit} on {device}; {sizes}", *plan_notes(plan)]
    for change in cheapest_changes(run, plan) if plan.fit != FITS else []:
        need = bytes_range(change.plan.low, change.plan.high)
        lines.append(f"with {change.keys}: {need}, {change.plan.fit}; costs: {change.cost}")
    return lines
