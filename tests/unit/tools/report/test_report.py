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


def test_refusals_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for argv, message in (
        (["none"], "none: no such folder; expected a run directory"),
        (["run", "./run"], "dtrain report was given a run twice"),
        (["run", "out=missing/page.html"], "out=missing/page.html: missing is no folder"),
        (["run", "verify=yes"], "verify=yes must be true or false"),
        (["--al"], "unknown option '--al'"),
        (["out=x.html"], "dtrain report needs the directory of a run"),
    ):
        assert main(["report", *argv]) == 2
        assert capsys.readouterr().err.startswith(f"dtrain: {message}")
