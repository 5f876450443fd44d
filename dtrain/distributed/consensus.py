"""Runs work on every rank, or on rank 0 for all, and reports a failure on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from dtrain.distributed.communicator import Communicator
from dtrain.errors import CommunicationError, DtrainError


def on_every_rank(
    comm: Communicator,
    what: str,
    work: Callable[[], Any],
    error_class: type[DtrainError],
    *,
    expected: tuple[type[Exception], ...] = (Exception,),
) -> list[Any]:
    """Runs ``work`` on every rank and returns the results (plain JSON) in rank order.

    A failure on any rank is raised on all of them, so that no rank continues or waits for the others.

    Args:
        comm: communicator of the ranks.
        what: name of the work, for the message ``WHAT failed on rank R: REASON``; empty: the message is the reason.
        work: function to run.
        error_class: error that an expected failure becomes.
        expected: expected failures; a rank with another one raises it unchanged, with its traceback.

    Raises:
        DtrainError: an ``error_class``, with the first rank on which ``work`` failed and its reason.
        CommunicationError: another rank had an unexpected failure.
    """
    cause: Exception | None = None
    try:
        report = json.dumps({"value": work()})  # inside: a result that is not JSON is a failure of this rank too
    except Exception as error:
        cause = error
        report = json.dumps({"error": describe(error), "expected": isinstance(error, expected)})
    reports = [json.loads(text) for text in comm.exchange_text(report)]
    failed = [rank for rank, other in enumerate(reports) if "error" in other]
    if not failed:
        return [other["value"] for other in reports]
    if cause is not None and not isinstance(cause, expected):  # a bug: the rank that has it shows its traceback
        raise cause
    unexpected = next((rank for rank in failed if not reports[rank]["expected"]), None)
    if unexpected is not None:
        raise CommunicationError(f"rank {unexpected} failed, so this one ends too: {reports[unexpected]['error']}")
    others = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
    prefix = f"{what} failed on rank {failed[0]}{others}: " if what else ""
    raise error_class(f"{prefix}{reports[failed[0]]['error']}") from cause


def on_rank_0(
    comm: Communicator,
    what: str,
    work: Callable[[], Any],
    error_class: type[DtrainError],
    *,
    expected: tuple[type[Exception], ...] = (Exception,),
) -> Any:
    """Runs ``work`` on rank 0 and returns its result (plain JSON) on every rank; see ``on_every_rank``."""

    def on_this_rank() -> Any:
        return work() if comm.rank == 0 else None

    return on_every_rank(comm, what, on_this_rank, error_class, expected=expected)[0]


def on_rank_0_for_long(
    comm: Communicator,
    what: str,
    work: Callable[[Callable[[], None]], Any],
    error_class: type[DtrainError],
    *,
    expected: tuple[type[Exception], ...] = (Exception,),
) -> Any:
    """Runs ``work`` as ``on_rank_0`` does, if it may take longer than the time-out of a collective.

    Args:
        comm: communicator of the ranks.
        what: name of the work, for the message.
        work: called with a function that it must call more often than the time-out, to keep the other ranks waiting.
        error_class: error that an expected failure becomes.
        expected: expected failures.
    """

    def once(report: Callable[[], dict[str, Any]]) -> Any:
        return on_rank_0(comm, what, report, error_class, expected=expected)

    def keep_waiting() -> None:  # one more round of the loop below, in which the other ranks wait
        once(dict)

    result = once(lambda: {"value": work(keep_waiting)})
    while "value" not in result:  # never on rank 0
        result = once(dict)
    return result["value"]


def describe(error: Exception) -> str:
    """Returns one line for another rank: the message of dtrain's and system errors, with the type for others."""
    if isinstance(error, DtrainError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} (errno {error.errno})" + (f": {error.filename}" if error.filename else "")
    return f"{type(error).__name__}: {error}"
