"""Counts the steps of a run, for an engine and its parts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RunState:
    """Holds what a checkpoint keeps of a run beside its tensors; the engine and its parts share it.

    Attributes:
        run_id: of the run, kept by its checkpoints.
        seed: keys the random numbers of forwards.
        attempted_steps: steps taken, skipped ones included.
        applied_steps: updates of the masters, by the steps that are finalized.
        data_cursor: samples consumed so far.
        missed_updates: updates that a trained parameter has missed, by name: no rank had a gradient of it.
    """

    run_id: str
    seed: int
    attempted_steps: int = 0
    applied_steps: int = 0
    data_cursor: int = 0
    missed_updates: dict[str, int] = field(default_factory=dict)
