"""The report as one HTML file that needs no other file, no network and no JavaScript."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from dtrain.measure.probe import sections
from dtrain.measure.probe.report import ProbeReport
from dtrain.telemetry.metrics import write_atomically
from dtrain.tools.tables import Table

_NUM_PRODUCTS = 10  # of each format
_STYLE = """
body { font-family: system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #d9d9d9; padding: 0.25rem 0.7rem; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #7f7f7f; }
pre { background: #f2f2f2; padding: 0.8rem; overflow-x: auto; font-size: 0.95rem; white-space: pre-wrap; }
.wide { overflow-x: auto; }
.small { color: #595959; font-size: 0.85rem; }
"""


def write_page(path: Path, report: ProbeReport, picture: bytes) -> None:
    """Writes the page, with the PNG in it, atomically. All text is escaped: names of modules are the user's."""
    encoded = base64.b64encode(picture).decode("ascii")
    parts = [
        "<h1>Precision probe</h1>",
        f'<p class="small">{escape(report.date)} &middot; <code>{escape(report.command)}</code></p>',
        "<h2>Advice</h2>",
        f"<pre>{escape(report.advice.line)}</pre>",
        _bullets(sections.advice_notes(report)),
        f'<p><img alt="{escape(_caption(report))}" src="data:image/png;base64,{encoded}"></p>',
        _table(sections.trial_table(report)),
        _bullets(sections.trial_notes(report)),
        _table(sections.product_table(report, _NUM_PRODUCTS)),
        _bullets(sections.scale_notes(report)),
        _table(sections.flip_table(report)) if report.flips else "",
        _bullets(sections.flip_notes(report)),
        "<h2>Not tested</h2>",
        _bullets(report.advice.untested),
        f'<p class="small">{escape(sections.time_note(report))}</p>',
    ]
    text = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Precision probe</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )
    write_atomically(path, text)


def _caption(report: ProbeReport) -> str:
    ends = [f"{trial.format}: {sections.outcome(report, trial)}" for trial in report.trials[1:]]
    return f"Loss gap of each format against FP32's noise ({'; '.join(ends)}), its effect by module, and the gradients"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in table.rows)
    return (
        f'<h2>{escape(table.title)}</h2>\n<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody>\n</table></div>"
    )


def _bullets(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""
