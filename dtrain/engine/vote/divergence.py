"""Explains how ranks have diverged: the first difference, with both values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.distributed.communicator import Communicator
from dtrain.engine.vote.record import COLUMNS, MUST_AGREE, VoteRecord


@dataclass(frozen=True)
class Disagreement:
    """The first field on which a rank differs from rank 0."""

    field: str
    rank: int
    expected: int | float  # rank 0's
    got: int | float


def find_disagreement(records: Sequence[VoteRecord]) -> Disagreement | None:
    """Returns the first field of :data:`MUST_AGREE` on which some rank differs from rank 0, or None."""
    rows = [record.to_row() for record in records]  # bits, as the device compares them
    for name in MUST_AGREE:
        column = COLUMNS[name]
        for rank, row in enumerate(rows):
            if row[column] != rows[0][column]:
                return Disagreement(name, rank, getattr(records[0], name), getattr(records[rank], name))
    return None


def explain(comm: Communicator, found: Disagreement, *, step: int, config_text: str, collectives: Sequence[str]) -> str:
    """Returns the error message; all ranks call it, because they exchange their configurations or collectives.

    Args:
        comm: the ranks.
        found: the field on which they differ.
        step: attempted steps before the one that failed.
        config_text: this rank's configuration, a JSON object.
        collectives: that this rank issued in that step.
    """
    head = f"step {step}: the ranks have diverged; nothing was updated. "
    if found.field == "config_hash":
        texts = [json.loads(text) for text in comm.exchange_text(config_text)]
        return head + config_difference(texts[0], texts[found.rank], found.rank)
    if found.field == "schedule_hash":
        logs = [text.split("\n") for text in comm.exchange_text("\n".join(collectives))]
        return head + _schedule_difference(logs[0], logs[found.rank], found.rank)
    return head + (
        f"{found.field} is {found.expected} on rank 0 and {found.got} on rank {found.rank}; every rank must run the "
        f"same loop"
    )


def config_difference(expected: Mapping[str, Any], got: Mapping[str, Any], rank: int) -> str:
    """Returns one line with the first key on which a rank's configuration differs from rank 0's, and both values."""
    for key in sorted({*expected, *got}):
        a, b = expected.get(key), got.get(key)
        if a != b:
            if isinstance(a, Mapping) and isinstance(b, Mapping):
                return f"{key}: " + config_difference(a, b, rank)
            return f"'{key}' is {a} on rank 0 and {b} on rank {rank}; start every rank with the same configuration"
    return f"the configurations of rank 0 and rank {rank} have different hashes but equal values"


def _schedule_difference(expected: list[str], got: list[str], rank: int) -> str:
    for number, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return f"Order of collectives: number {number} of this step is {a} on rank 0 and {b} on rank {rank}"
    return f"Collectives issued in this step: {len(expected)} on rank 0 and {len(got)} on rank {rank}"
