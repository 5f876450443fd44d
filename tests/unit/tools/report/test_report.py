"""``dtrain report``."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.__main__ import main
from tests.helpers.run_folders import make_run


def test_one_run_has_its_page_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}/report.html\n"
    first = (run / "report.html").read_bytes()
    assert main(["report", str(run), f"out={tmp_path}/again.html", "verify=true"]) == 0
    assert (tmp_path / "again.html").read_bytes() == first  # it has no checkpoint
    assert main(["report", str(run), f"out={tmp_path}/missing/page.html"]) == 2
    assert "missing is no folder; make it, or name another file" in capsys.readouterr().err
