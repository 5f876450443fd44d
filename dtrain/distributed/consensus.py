"""Doing something on every rank, or on rank 0 for all, and learning on every rank how it went."""

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
    """Runs ``work`` here and returns what it returned on every rank (plain JSON), in rank order.

    A failure on any rank is raised on all of them, so that none goes on alone or waits for ever.

    Args:
        comm: the ranks.
        what: is being done, for the message: ``WHAT failed on rank R: REASON``; empty leaves the reason alone.
        work: what to run.
        error_class: what an expected failure becomes.
        expected: the failures that are; a rank with another one raises it as it is, with its traceback.

    Raises:
        DtrainError: an ``error_class``: ``work`` raised on one or more ranks; names the first of them and its reason.
        CommunicationError: another rank failed in a way that was not expected.
    """
    cause: Exception | None = None
    try:
        report = json.dumps({"value": work()})
    except Exception as error:
        cause = error
        report = json.dumps({"error": describe(error), "expected": isinstance(error, expected)})
    reports = [json.loads(text) for text in comm.exchange_text(report)]
    failed = [rank for rank, other in enumerate(reports) if "error" in other]
    if not failed:
        return [other["value"] for other in reports]
    if cause is not None and not isinstance(cause, expected):
        raise cause
    unexpected = next((rank for rank in failed if not reports[rank]["expected"]), None)
    if unexpected is not None:
        raise CommunicationError(f"rank {unexpected} failed, so this one ends too: {reports[unexpected]['error']}")
    others = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
    place = f"{what} failed on rank {failed[0]}{others}: " if what else ""
    raise error_class(f"{place}{reports[failed[0]]['error']}") from cause


def on_rank_0(
    comm: Communicator,
    what: str,
    work: Callable[[], Any],
    error_class: type[DtrainError],
    *,
    expected: tuple[type[Exception], ...] = (Exception,),
) -> Any:
    """Runs ``work`` on rank 0 and returns its plain JSON value on every rank; else as :func:`on_every_rank`."""

    def only_there() -> Any:
        return work() if comm.rank == 0 else None

    return on_every_rank(comm, what, only_there, error_class, expected=expected)[0]


def on_rank_0_for_long(
    comm: Communicator,
    what: str,
    work: Callable[[Callable[[], None]], Any],
    error_class: type[DtrainError],
    *,
    expected: tuple[type[Exception], ...] = (Exception,),
) -> Any:
    """As :func:`on_rank_0`, of work that may take longer than a collective is let wait.

    Args:
        comm: the ranks.
        what: is being done, for the message.
        work: is given a function to call now and then, more often than the limit: the other ranks go on waiting then.
        error_class: what an expected failure becomes.
        expected: the failures that are.
    """

    def once(report: Callable[[], dict[str, Any]]) -> Any:
        return on_rank_0(comm, what, report, error_class, expected=expected)

    def go_on_waiting() -> None:
        once(dict)

    answer = once(lambda: {"value": work(go_on_waiting)})
    while "value" not in answer:  # never on rank 0
        answer = once(dict)
    return answer["value"]


def describe(error: Exception) -> str:
    """One line for another rank: the message alone where it is ours or the system's, else with its type."""
    if isinstance(error, DtrainError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} (errno {error.errno})" + (f": {error.filename}" if error.filename else "")
    return f"{type(error).__name__}: {error}"
