"""The page of an acceptance, in Markdown: the result, a section for each part, and what was left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from dtrain.tools.accept.part import Part
from dtrain.tools.accept.records import DONE, Acceptance, PartRecord
from dtrain.tools.tables import Table, plural


def render(acceptance: Acceptance, parts: Sequence[Part]) -> str:
    machine = acceptance.machine
    name = machine["name"] if machine["device"] == "cuda" else "a CPU"
    lines = [
        f"# Acceptance of {name}",
        "",
        f"`{acceptance.command}`, {acceptance.date}",
        "",
        f"{machine['host_summary']}. {_device(machine)}",
        "",
        *_result(acceptance, parts),
    ]
    modules = {part.key: part.module for part in parts}
    for record in acceptance.parts:
        lines += ["", f"## {record.key}. {record.title}", "", *_section(record, modules[record.key])]
    return "\n".join([*lines, *_left_out(acceptance, parts)]) + "\n"


def _device(machine: dict[str, Any]) -> str:
    peaks = {name: peak for name, peak in machine["peak_tflops"].items() if peak is not None}
    rates = ", ".join(f"{name} {peak:g}" for name, peak in peaks.items()) or "unknown"
    packages = "".join(f", {name} {version}" for name, version in machine["packages"].items())
    if machine["device"] != "cuda":
        return "No GPU was used: all shapes are small, and the figures only show that the command runs."
    shapes = " Its memory is small, so all shapes are small." if machine["small"] else ""
    return (
        f"Device: {machine['name']}, {machine['memory_gib']:g} GiB, compute capability {machine['capability']}, CUDA "
        f"{machine['cuda']}, NCCL {machine['nccl']}{packages}. Published dense peak rates, TFLOP/s: {rates}.{shapes}"
    )


def _result(acceptance: Acceptance, parts: Sequence[Part]) -> list[str]:
    failures = [f"- {record.key}: {line}" for record in acceptance.parts for line in record.failures]
    conclusions = [
        f"- {record.key}: {line}" for record in acceptance.parts for line in record.results.get("conclusions") or []
    ]
    done = sum(record.status == DONE for record in acceptance.parts)
    what = f"{done} of {plural(len(parts), 'part')} finished"
    found = f"{plural(len(failures), 'thing')} did not work:" if failures else "nothing failed."
    rows = [
        (record.key, record.title, record.status, f"{record.seconds:.0f} s", f"{record.share_s:.0f} s")
        for record in acceptance.parts
    ]
    titles = {part.key: part.title for part in parts}
    rows += [(key, titles[key], f"not run: {reason}", "", "") for key, reason in acceptance.not_run.items()]
    table = Table("Parts", ("", "part", "status", "took", "was given"), sorted(rows))
    return [
        "## Result",
        "",
        f"**{what}; {found}**",
        "",
        *([*failures, ""] if failures else []),
        *([*conclusions, ""] if conclusions else []),
        table.markdown(),
    ]


def _section(record: PartRecord, module: str) -> list[str]:
    """Returns the lines of one part. An error in its own text must not cost the page."""
    lines = []
    if record.status != DONE:
        lines += [f"**{record.status}**: {record.error}", "", "```text", *record.log_tail, "```", ""]
        if not record.results:
            return lines
        lines += ["Partial results:", ""]
    try:
        lines += import_module(module).section(record.results)
    except Exception as error:
        lines.append(f"The section cannot be written ({type(error).__name__}: {error}); accept.json has the results.")
    if failures := record.results.get("failures"):
        lines += ["", "Did not work:", "", *(f"- {line}" for line in failures)]
    return lines


def _left_out(acceptance: Acceptance, parts: Sequence[Part]) -> list[str]:
    titles = {part.key: part.title for part in parts}
    rows = [(key, titles[key], reason) for key, reason in acceptance.not_run.items()]
    for record in acceptance.parts:
        by_reason: dict[str, list[str]] = defaultdict(list)
        for name, reason in (record.results.get("left_out") or {}).items():
            by_reason[str(reason)].append(name)
        rows += [(record.key, "; ".join(names), reason) for reason, names in by_reason.items()]
    lines = ["", "## Left out", ""]
    if not rows:
        return [*lines, "Nothing."]
    return [*lines, *(f"- {key}: {what}: {reason}" for key, what, reason in rows)]
