"""Prints the memory that a run needs on a rank, before it is started, or beside what a run took."""

from __future__ import annotations

from dtrain.tools.tables import Table, show
from dtrain.train.memory.plan import MARGIN, plan_memory
from dtrain.train.memory.receipt import PEAK, STEP, Receipt, bytes_range, fit_lines
from dtrain.train.planned import PlannedRun

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
}


def show_memory(run: PlannedRun) -> None:
    """Prints the plan: the kinds, whether the run fits, the largest micro-batch that does, and changes."""
    plan = plan_memory(run)
    meanings = {**_MEANINGS, MARGIN: ", ".join(plan.margin.reasons)}
    rows = [(row.kind, bytes_range(row.low, row.high), meanings.get(row.kind, "")) for row in plan.rows]
    rows.append(("total", bytes_range(plan.low, plan.high), ""))
    title = f"Memory of a rank at the peak of a step, rank 0 of {plan.num_ranks} on {plan.device.name}"
    show([Table(title, ("kind", "planned", "what it is"), rows)])
    for line in fit_lines(run, plan):
        print(line)


def show_against(receipt: Receipt, run: PlannedRun) -> None:
    """Prints the plan of a run beside what the run has measured."""
    measured = {row.kind: row.measured for row in receipt.rows}
    peak = measured.get(PEAK)
    states = {kind: nbytes or 0 for kind, nbytes in measured.items() if kind not in (STEP, PEAK)}
    again = Receipt.of(plan_memory(run), states, peak)
    rows = [(row.kind, *row.texts(), _deviation(row.planned_low, row.planned_high, row.measured)) for row in again.rows]
    show([Table("Memory of rank 0, planned and measured", ("kind", "planned", "measured", ""), rows)])
    for note in receipt.notes:
        print(note)


def _deviation(low: int, high: int, measured: int | None) -> str:
    if measured is None:
        return "not measured"
    if low <= measured <= high:
        return "as planned"
    nearest = low if measured < low else high
    return f"{100 * (measured - nearest) / max(nearest, 1):+.1f} %"
