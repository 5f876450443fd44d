"""Prints the memory that a run needs on a rank, before it is started, or beside what a run took."""

from __future__ import annotations

from collections.abc import Mapping

from dtrain.planning.memory.changes import cheapest_changes
from dtrain.planning.memory.plan import FITS, MARGIN, MemoryPlan, largest_micro_batch, plan_memory
from dtrain.planning.planned_run import PlannedRun
from dtrain.telemetry.texts import bytes_range, bytes_text
from dtrain.tools.tables import Table, show
from dtrain.train.receipt import PEAK, STEP, Receipt, ReceiptRow

_MEANINGS = {
    "compute": "weights in the format of the products",
    "unsharded": "full weights at one time (stage 3)",
    "main_grad": "gradients of a step",
    "master": "master weights, or their remainders",
    "moments": "states of the optimizer",
    "unreduced_grad": "gradients on their way to their owners",
    "frozen": "frozen weights",
    "buffers": "the model's buffers",
    "matrices": "matrices on their way (Muon)",
    "activations": "what forward leaves for backward",
    "other": "micro-batch, votes",
    "update": "what the update takes",
    "backward": "gradients of activations and weights",
    "transfer": "sums on their way to the host",
    "saved_copy": "copy that an asynchronous save writes",
    STEP: "what a step takes in addition",
    MARGIN: "fragments of the heap, scratch of kernels, libraries",
}


def show_memory(run: PlannedRun) -> None:
    """Prints the plan: the kinds, whether the run fits, the largest micro-batch that does, and changes."""
    plan, name = plan_memory(run), run.config.precision.name
    margin = "the driver's context, kernels, fragments" + (", NCCL" if plan.num_ranks > 1 else "")
    meanings = _MEANINGS | ({MARGIN: margin} if plan.device.type == "cuda" else {})
    rows = [(kind, bytes_range(*bounds), meanings.get(kind, "")) for kind, bounds in plan.rows.items()]
    title = f"Memory at the peak of a step, precision={name}, rank 0 of {plan.num_ranks} on {plan.device.name}"
    show([Table(title, ("kind", "planned", "what it is"), rows)])
    print(*fit_lines(run, plan), sep="\n")


def show_against(receipt: Receipt, run: PlannedRun) -> None:
    """Prints the plan of a run beside what the run has measured."""
    measured = {row.kind: row.measured for row in receipt.rows}
    peak = measured.get(PEAK)
    states = {kind: nbytes or 0 for kind, nbytes in measured.items() if kind not in (STEP, PEAK)}
    again = receipt_of(plan_memory(run), states, peak)
    rows = [(row.kind, *row.texts(), row.deviation()) for row in again.rows]
    show([Table("Memory of rank 0, planned and measured", ("kind", "planned", "measured", ""), rows)])
    for note in receipt.notes:
        print(note)


def receipt_of(plan: MemoryPlan, states: Mapping[str, int], peak: int | None) -> Receipt:
    """Returns the receipt of ``states``, measured by ``engine.memory()``, and of the ``peak``, None if unknown."""
    planned, host = plan.states, plan.host
    states = {kind: nbytes for kind, nbytes in states.items() if kind not in host}
    kinds = [kind for kind in states if states[kind] or planned.get(kind)]
    rows = [ReceiptRow(kind, planned.get(kind, 0), planned.get(kind, 0), states[kind]) for kind in kinds]
    held, measured = sum(planned.values()), sum(states.values())
    rows.append(ReceiptRow(STEP, plan.low - held, plan.high - held, None if peak is None else peak - measured))
    rows.append(ReceiptRow(PEAK, plan.low, plan.high, peak))
    where = "growth of the resident set" if plan.device.type == "cpu" else "memory of the device"
    note = f"rank 0 of {plan.num_ranks} on {plan.device.name}; the peak is the {where}"
    return Receipt(rows, [note, *plan.notes], plan.device.name, plan.num_ranks)


def plan_lines(run: PlannedRun) -> list[str]:
    """Returns the plan as text: kinds, whether it fits, largest micro-batch, changes."""
    plan = plan_memory(run)
    kinds = [f"memory {kind:<16} {bytes_range(*bounds):>24}" for kind, bounds in plan.rows.items()]
    return [*kinds, *fit_lines(run, plan)]


def fit_lines(run: PlannedRun, plan: MemoryPlan) -> list[str]:
    """Returns whether the run fits, the largest micro-batch that does, and changes if it does not."""
    device = f"{plan.device.name} ({bytes_text(plan.device.memory)} for a rank)"
    own, largest = run.config.train.micro_batch_size, largest_micro_batch(run, plan)
    sizes = f"the largest micro-batch that fits is {largest} (planned: {own})" if largest else "no micro-batch fits"
    lines = [f"{plan.fit} on {device}; {sizes}", *plan.notes]
    for change in cheapest_changes(run, plan) if plan.fit != FITS else []:
        need = bytes_range(change.plan.low, change.plan.high)
        lines.append(f"with {change.keys}: {need}, {change.plan.fit}; costs: {change.cost}")
    return lines
