"""The page of an acceptance, in Markdown: targets, failures, conclusions, a section for each part. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dtrain.errors import DtrainError
from dtrain.measure.accept.job import CUT, DONE, FAILED, LATE, Ended, Lines, read_json
from dtrain.measure.accept.lines import read_lines
from dtrain.measure.accept.table import PARTS
from dtrain.measure.accept.targets import table_of_targets
from dtrain.measure.bench.records import AnyResults, read_results
from dtrain.tools.tables import Table, plural


@dataclass(frozen=True)
class Acceptance:
    """Facts of one machine and the jobs that have ended; their results lie in the results directory.

    Attributes:
        machine: device, its driver's facts, and versions.
        not_run: name of each job without results, with the reason.
        left_out: name of each job that cannot run here, with the reason.
    """

    command: str
    date: str
    goal: str
    limit_s: float
    machine: dict[str, Any]
    ended: list[Ended] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def as_plain(self, folder: Path) -> dict[str, Any]:
        """Returns all of it with the results, as ``accept.json`` has them."""
        ended = [asdict(found) | {"results": read_json(folder / found.results)} for found in self.ended]
        return asdict(self) | {"ended": ended}

    def lines(self, folder: Path) -> dict[str, Lines]:
        """Returns the lines of each job that has begun."""
        order = {part: number for number, part in enumerate(PARTS)}
        return {
            found.name: read_lines(found, folder) for found in sorted(self.ended, key=lambda found: order[found.part])
        }

    def failures(self, folder: Path) -> list[str]:
        """Returns what does not hold, one line each."""
        own = [f"{found.name} {found.status}: {found.error}" for found in self.ended if found.status in (FAILED, LATE)]
        return [*own, *(f"{name}: {line}" for name, lines in self.lines(folder).items() for line in lines.failures)]


def render(acceptance: Acceptance, folder: Path) -> str:
    """Returns the page; the results of the jobs lie in ``folder``."""
    all_lines = acceptance.lines(folder)
    page = [
        f"# Acceptance of {acceptance.machine.get('name') or 'a CPU'}",
        "",
        f"`{acceptance.command}`, {acceptance.date}, {_machine(acceptance.machine)}",
        "",
        *_result(acceptance, all_lines, folder),
    ]
    by_name = {found.name: found for found in acceptance.ended}
    part = ""
    for name, lines in all_lines.items():
        found = by_name[name]
        page += ["", f"## {PARTS[found.part]}"] if found.part != part else []
        part = found.part
        page += ["", f"### {name}", "", f"`{found.command}`", "", *(lines.section or ["No results."])]
        if found.tail:
            page += ["", f"**{name} {found.status}**: {found.error}", "", "```text", *found.tail, "```"]
        page += ["", "Did not work:", "", *(f"- {line}" for line in lines.failures)] if lines.failures else []
    return "\n".join([*page, "", *_left_out(acceptance, all_lines)]) + "\n"


def summary(acceptance: Acceptance, folder: Path) -> str:
    """Returns what the console shows at the end: the page up to its first section."""
    return render(acceptance, folder).split("\n### Jobs", 1)[0]


def _machine(machine: Mapping[str, Any]) -> str:
    if machine["device"] != "cuda":
        return "no GPU: all shapes are tiny, and the figures only show that the command runs"
    text = ", ".join(f"{key} {value}" for key, value in machine.items() if key not in ("device", "packages"))
    return f"{text}, {', '.join(f'{name} {number}' for name, number in machine['packages'].items())}"


def _result(acceptance: Acceptance, all_lines: Mapping[str, Lines], folder: Path) -> list[str]:
    failures, done = acceptance.failures(folder), sum(found.status == DONE for found in acceptance.ended)
    what = f"{done} of {plural(len(acceptance.ended) + len(acceptance.not_run), 'job')} done"
    found = f"{plural(len(failures), 'thing')} did not work:" if failures else "nothing failed."
    conclusions = [f"- {name}: {line}" for name, lines in all_lines.items() for line in lines.conclusions]
    rows = [(job.name, job.part, job.status, f"{job.seconds:.0f} s", job.error) for job in acceptance.ended]
    rows += [(name, "", "not run", "", reason) for name, reason in acceptance.not_run.items()]
    return [
        "## Targets",
        "",
        table_of_targets(_suite_results(acceptance, folder)),
        "",
        "## Result",
        "",
        f"**{what}; {found}**",
        "",
        *([*(f"- {line}" for line in failures), ""] if failures else []),
        *([*conclusions, ""] if conclusions else []),
        "### Jobs",
        "",
        Table("Jobs", ("job", "part", "", "took", "why"), rows).markdown(),
    ]


def _suite_results(acceptance: Acceptance, folder: Path) -> list[AnyResults]:
    """Returns the results of suites on a GPU; a CPU says nothing about the targets."""
    results = []
    for found in acceptance.ended if acceptance.machine["device"] == "cuda" else ():
        with suppress(DtrainError):  # other results, or none
            results.append(read_results(folder / found.results))
    return results


def _left_out(acceptance: Acceptance, all_lines: Mapping[str, Lines]) -> list[str]:
    by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    for job, lines in all_lines.items():
        for name, reason in lines.left_out.items():
            by_reason[job, str(reason)].append(name)
    rows = [f"- {job}: {'; '.join(names)}: {reason}" for (job, reason), names in by_reason.items()]
    rows += [f"- {found.name}: {found.error}" for found in acceptance.ended if found.status == CUT]
    rows += [f"- {name}: {reason}" for name, reason in acceptance.left_out.items()]
    return ["## Left out", "", *(rows or ["Nothing."])]
