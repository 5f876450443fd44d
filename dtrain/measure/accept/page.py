"""The page of an acceptance, in Markdown: targets, failures, conclusions, a section for each part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtrain.measure.accept import curves, steps, targets
from dtrain.measure.accept.job import DONE, Ended
from dtrain.measure.accept.plan import PARTS
from dtrain.measure.accept.report import PartReport, report_of_jobs
from dtrain.tools.tables import Table, plural


@dataclass(frozen=True)
class Acceptance:
    """Results and facts of one machine, as ``accept.json`` holds them.

    Attributes:
        machine: device, its driver's facts, and versions.
        not_run: name of each job without results, with the reason.
        left_out: by part, names of cases that cannot run here, with the reason.
    """

    command: str
    date: str
    goal: str
    limit_s: float
    machine: dict[str, Any]
    ended: list[Ended] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)

    def reports(self) -> dict[str, PartReport]:
        """Returns the report of each part that has begun."""
        reports = {}
        for part in PARTS:
            own = [found for found in self.ended if found.part == part]
            if not own:
                continue
            left_out = self.left_out.get(part, {})
            if part == "curves":
                reports[part] = curves.report(own, left_out)
            elif part == "steps":
                found = steps.report(own)
                reports[part] = PartReport(
                    found.conclusions, found.failures, {**left_out, **found.left_out}, found.section
                )
            elif part == "compiled":
                reports[part] = compiled_report(own)
            else:
                reports[part] = report_of_jobs(own)
        return reports

    @property
    def failures(self) -> list[str]:
        return [f"{part}: {line}" for part, report in self.reports().items() for line in report.failures]


def compiled_report(ended: Sequence[Ended]) -> PartReport:
    """Returns a line for each kind of compiled block."""
    lines = []
    for found in ended:
        if figures := found.results.get("figures"):
            warned = f"; warned: {'; '.join(figures['warnings'])}" if figures["warnings"] else ""
            lines.append(
                f"{found.name}: {plural(figures['graphs'], 'graph')}, {plural(figures['graph_breaks'], 'break')}, "
                f"first step {figures['first_step_s']:.1f} s{warned}"
            )
    peers = {found.name: found.error for found in ended if found.error and not steps.is_dtrain(found.name)}
    others = report_of_jobs([found for found in ended if found.name not in peers])
    return PartReport(
        lines, others.failures, {**others.left_out, **peers}, [*(f"- {line}" for line in lines), *others.section]
    )


def render(acceptance: Acceptance) -> str:
    """Returns the page."""
    reports = acceptance.reports()
    lines = [
        f"# Acceptance of {acceptance.machine.get('name') or 'a CPU'}",
        "",
        f"`{acceptance.command}`, {acceptance.date}, {_machine(acceptance.machine)}",
        "",
        *_result(acceptance, reports),
    ]
    for part, report in reports.items():
        lines += ["", f"## {PARTS[part]}", ""]
        lines += report.section or ["No results."]
        lines += ["", "Did not work:", "", *(f"- {line}" for line in report.failures)] if report.failures else []
    return "\n".join([*lines, "", *_left_out(acceptance, reports)]) + "\n"


def summary(acceptance: Acceptance) -> str:
    """Returns what the console shows at the end: the page up to its first section."""
    return render(acceptance).split("\n### Jobs", 1)[0]


def _machine(machine: Mapping[str, Any]) -> str:
    if machine["device"] != "cuda":
        return "no GPU: all shapes are tiny, and the figures only show that the command runs"
    text = ", ".join(f"{key} {value}" for key, value in machine.items() if key not in ("device", "packages"))
    return f"{text}, {', '.join(f'{name} {number}' for name, number in machine['packages'].items())}"


def _result(acceptance: Acceptance, reports: Mapping[str, PartReport]) -> list[str]:
    failures, done = acceptance.failures, sum(found.status == DONE for found in acceptance.ended)
    what = f"{done} of {plural(len(acceptance.ended) + len(acceptance.not_run), 'job')} done"
    found = f"{plural(len(failures), 'thing')} did not work:" if failures else "nothing failed."
    conclusions = [f"- {part}: {line}" for part, report in reports.items() for line in report.conclusions]
    rows = [(job.name, job.part, job.status, f"{job.seconds:.0f} s", job.error) for job in acceptance.ended]
    rows += [(name, "", "not run", "", reason) for name, reason in acceptance.not_run.items()]
    return [
        "## Targets",
        "",
        targets.table(targets.check_targets(acceptance.ended)),
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


def _left_out(acceptance: Acceptance, reports: Mapping[str, PartReport]) -> list[str]:
    by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    for part, report in reports.items():
        for name, reason in report.left_out.items():
            by_reason[part, str(reason)].append(name)
    for part, cases in acceptance.left_out.items():
        for name, reason in cases.items() if part not in reports else ():
            by_reason[part, reason].append(name)
    rows = [f"- {part}: {'; '.join(names)}: {reason}" for (part, reason), names in by_reason.items()]
    return ["## Left out", "", *(rows or ["Nothing."])]
