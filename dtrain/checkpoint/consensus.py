"""Doing something on every rank and learning, on every rank, how it went on each of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from dtrain.distributed.collectives import Communicator
from dtrain.errors import CheckpointError, DtrainError


def on_every_rank(comm: Communicator, what: str, work: Callable[[], Any]) -> list[Any]:
    """Runs ``work`` here and returns what it returned on every rank (plain JSON), in rank order.

    A failure on any rank is raised on all of them, so that none goes on alone or waits for ever.

    Raises:
        CheckpointError: ``work`` raised on one or more ranks; names the first of them and its reason.
    """
    cause: Exception | None = None
    try:
        report = {"value": work()}
    except Exception as error:
        cause = error
        report = {"error": describe(error)}
    reports = [json.loads(text) for text in comm.exchange_text(json.dumps(report))]
    failed = [rank for rank, other in enumerate(reports) if "error" in other]
    if failed:
        others = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise CheckpointError(f"{what} failed on rank {failed[0]}{others}: {reports[failed[0]]['error']}") from cause
    return [other["value"] for other in reports]


def on_rank_zero(comm: Communicator, what: str, work: Callable[[], Any]) -> Any:
    """Runs ``work`` on rank 0 and returns its plain JSON value on every rank.

    Raises:
        CheckpointError: ``work`` raised; on every rank, with the reason.
    """
    return on_every_rank(comm, what, lambda: work() if comm.rank == 0 else None)[0]


def describe(error: Exception) -> str:
    """One line for another rank: the message alone where it is ours or the system's, else with its type."""
    if isinstance(error, DtrainError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} (errno {error.errno})" + (f": {error.filename}" if error.filename else "")
    return f"{type(error).__name__}: {error}"
