"""Explains how ranks have diverged: the first difference, with both values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dtrain.distributed.communicator import Communicator
from dtrain.engine.vote.record import COLUMNS, MUST_AGREE, HostRecord


def find_disagreement(hosts: Sequence[HostRecord]) -> tuple[str, int] | None:
    """Returns the first field of ``MUST_AGREE`` on which a rank differs from rank 0, and that rank, or None."""
    rows = [host.to_row() for host in hosts]  # bits, as the device compares them
    for name in MUST_AGREE:  # the earliest cause first: one difference leads to others
        for rank, row in enumerate(rows):
            if row[COLUMNS[name]] != rows[0][COLUMNS[name]]:
                return name, rank
    return None


def explain(
    comm: Communicator,
    hosts: Sequence[HostRecord],
    *,
    config_text: str,
    collectives: Sequence[str],
    written: str = "{}",
) -> str:
    """Returns the error message; all ranks call it, because they exchange their configurations or collectives.

    Args:
        comm: the ranks.
        hosts: the host's record of each rank; the ranks have diverged.
        config_text: this rank's configuration, a JSON object.
        collectives: that this rank issued in the step.
        written: fingerprints of the parameters that were written to on this rank, a JSON object.
    """
    found = find_disagreement(hosts)
    assert found is not None
    name, rank = found
    head = f"step {hosts[0].step}: the ranks have diverged; nothing was updated. "
    if name == "config_hash":
        first, second = map(json.loads, texts_of(comm, config_text, rank))
        return head + config_difference(first, second, rank)
    if name == "schedule_hash":
        expected_log, got_log = (text.split("\n") for text in texts_of(comm, "\n".join(collectives), rank))
        return head + _schedule_difference(expected_log, got_log, rank)
    if name == "written_weights":
        return head + written_difference([json.loads(text) for text in comm.exchange_text(written)])
    expected, got = getattr(hosts[0], name), getattr(hosts[rank], name)
    return head + f"{name} is {expected} on rank 0 and {got} on rank {rank}; every rank must run the same loop"


def texts_of(comm: Communicator, text: str, rank: int) -> tuple[str, str]:
    """Returns the texts of rank 0 and of ``rank``; all ranks call, and the others send nothing."""
    texts = comm.exchange_text(text if comm.rank in (0, rank) else "")
    return texts[0], texts[rank]


def written_difference(written: Sequence[Mapping[str, int]]) -> str:
    """Returns one line with the first parameter that differs, from the fingerprints by name of every rank."""
    for rank, other in enumerate(written):
        for name in sorted({*written[0], *other}):
            if written[0].get(name) == other.get(name):
                continue
            if name in written[0] and name in other:
                head = f"the values written to parameter '{name}' differ on rank 0 and rank {rank}"
            else:
                here, there = (0, rank) if name in written[0] else (rank, 0)
                head = f"parameter '{name}' was written to on rank {here} and not on rank {there}"
            return (
                f"{head}; write the same values on all ranks, or write inside `with engine.modify_weights():`, which "
                f"compares them before it takes them"
            )
    return "the ranks have written different weights"


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
