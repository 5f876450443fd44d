from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dtrain.__main__ import main
from dtrain.precision.histogram import Histogram
from dtrain.precision.report import GradientShares, ParameterPrecision, PrecisionReport, UpdateShares
from dtrain.telemetry.precision import PrecisionFindings
from dtrain.telemetry.precision_files import PrecisionFiles


def report(step: int, num_small: int) -> PrecisionReport:
    """``a.weight`` has ``num_small`` of 100 elements at 2^-30, ``b.weight`` none; the better scale is 2^14."""
    parameters = []
    for name, small in (("a.weight", num_small), ("b.weight", 0)):
        histogram = Histogram.of(torch.tensor([2.0**-30] * small + [0.25] * (100 - small) + [0.0] * 100))
        shares = GradientShares.of(histogram, 0.25, 2.0**14)
        update = UpdateShares(200, 0.001, 0.5, 0.25)
        parameters.append(ParameterPrecision(name, 200, "bf16", 0.25, histogram, shares, update))
    return PrecisionReport(step, True, 1.0, 2.0**14, tuple(reversed(parameters)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    files = PrecisionFiles(tmp_path, 0)
    for step, num_small in ((10, 0), (20, 30)):
        files.precision(PrecisionFindings(report(step, num_small)))
    return tmp_path


def test_table_is_of_the_newest_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", "histogram", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "## Step 20, loss scale 1"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert rows[0][:6] == ["parameter", "computed in", "zeros", "FP16 flushes", "scale 16384 recovers", "E4M3 flushes"]
    assert rows[2] == ["`a.weight`", "bf16", "50.00 %", *["30.00 %"] * 3, "0", "1.0e-03", "50.00 %", "25.00 %"]
    assert [row[0] for row in rows[2:]] == ["`a.weight`", "`b.weight`"]


def test_picture_is_drawn_of_the_chosen_parameters(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = run / "b.png"
    assert main(["formats", "histogram", str(run), str(picture), "b.*"]) == 0
    out = capsys.readouterr().out
    assert "a.weight" not in out
    assert out.endswith(f"{picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
