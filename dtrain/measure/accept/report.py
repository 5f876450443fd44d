"""The lines of one part on the page and the console, from the jobs that belong to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dtrain.measure.accept.job import Ended


@dataclass(frozen=True)
class PartReport:
    """Lines on one part.

    Attributes:
        conclusions: what works, how fast, what to set.
        failures: what does not hold on this machine; the exit code is then 1.
        left_out: name of each case that did not run, with the reason.
        section: Markdown.
    """

    conclusions: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: Mapping[str, str] = field(default_factory=dict)
    section: list[str] = field(default_factory=list)


def report_of_jobs(ended: Sequence[Ended]) -> PartReport:
    """Returns the lines that the jobs themselves have written."""
    conclusions: list[str] = []
    failures: list[str] = []
    left_out: dict[str, str] = {}
    section: list[str] = []
    for found in ended:
        conclusions += found.results.get("conclusions", [])
        failures += found.failures
        left_out |= found.results.get("left_out", {})
        if section:
            section += ["", f"### {found.name}", ""]
        section += found.results.get("section", [])
        if found.tail:
            section += ["", f"**{found.name} {found.status}**: {found.error}", "", "```text", *found.tail, "```"]
    return PartReport(conclusions, failures, left_out, section)
