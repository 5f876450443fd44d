"""Writes the golden page again: ``python -m tests.unit.telemetry.report.regenerate_golden``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from dtrain.telemetry.report.page import page
from dtrain.telemetry.report.read import Run
from tests.helpers.run_folders import make_run

GOLDEN = Path(__file__).parent / "golden.html"


def golden_page(folder: Path) -> str:
    """Returns the page of the golden run, which is made in ``folder``."""
    return page([Run.open(make_run(folder / "golden", sample_txt="def f(x):\n    return <x>\n"))])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        GOLDEN.write_text(golden_page(Path(scratch)), encoding="utf-8")
