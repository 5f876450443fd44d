"""Records of an acceptance, as its results files hold them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DONE, FAILED, LATE = "done", "failed", "late"


@dataclass(frozen=True)
class PartRecord:
    """One run of a part.

    Attributes:
        status: :data:`DONE`; else :data:`FAILED` or :data:`LATE`, and ``results`` are those it had saved.
        share_s: seconds that it was given to plan with.
        fingerprint: machine and versions; results with another one are not reused.
        log_tail: last lines of its log unless it is done.
    """

    key: str
    title: str
    status: str
    seconds: float
    share_s: float
    date: str
    fingerprint: dict[str, Any]
    results: dict[str, Any]
    error: str = ""
    log_tail: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """Returns what does not hold, one line each; empty if the part is accepted."""
        found = [str(line) for line in self.results.get("failures") or []]
        return found if self.status == DONE else [f"{self.status}: {self.error}", *found]


@dataclass(frozen=True)
class Acceptance:
    """Results and facts of one machine.

    Attributes:
        machine: facts from :mod:`dtrain.tools.accept.machine`.
        not_run: parts without results, with the reason.
    """

    command: str
    date: str
    minutes: float
    machine: dict[str, Any]
    parts: list[PartRecord]
    not_run: dict[str, str]
