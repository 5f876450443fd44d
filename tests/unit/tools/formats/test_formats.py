from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from dtrain.__main__ import main
from dtrain.precision.histogram import Histogram
from dtrain.precision.report import GradientShares, ParameterPrecision, PrecisionReport, UpdateShares
from dtrain.telemetry.precision import PrecisionFindings
from dtrain.telemetry.precision_files import PrecisionFiles
from dtrain.tools.formats.failures import FAILURES


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    """The printed text of each failure by its title, in one line."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["formats", "failures"]) == 0
    blocks = printed.getvalue().strip().split("\n\n")
    return {block.splitlines()[0].partition(":")[0]: " ".join(block.split()) for block in blocks}


EXPECTED = {
    "A product overflows": [
        r"fp32: 300 x 300 = 90000 .*bf16: 300 x 300 = 90112 .*fp16: 300 x 300 = inf",
        r"detected precision=fp16: the step is skipped, nonfinite_loss: forward loss is Inf .*the weight is still 300",
        r"fixed precision=bf16: the step is applied, loss 90112",
        r"fixed precision=fp16 and the rule product: fp32: the step is applied, loss 90000",
    ],
    "A scaled gradient overflows": [
        r"shown fp16: a gradient of 8 times a loss scale of 65536 = inf",
        r"detected precision=fp16: the step is skipped, overflow: local gradient of 'product.weight'.*still 1",
        r"fixed loss_scale=dynamic.* 4 skipped steps, then the step is applied, loss 8 at 4096",
        r"fixed loss_scale=calibrated: after 3 measured steps 512",
    ],
    "Small addends are lost": [
        r"fp32: 1 \+ 1e-4 = 1.0001 .*bf16: 1 \+ 1e-4 = 1 .*fp16: 1 \+ 1e-4 = 1 ",
        r"bf16: 100 updates .* a weight from 1 to 1 shown fp16: 100 updates .* a weight from 1 to 1 detected",
        r"refused: master and output dtype are FP32 in every policy",
        r"precision=bf16, FP32 masters: .*: to 0\.9[89]\d+ fixed precision=fp16, FP32 masters: .*: to 0\.9[89]\d+$",
    ],
    "Gradients underflow": [
        r"shown fp16: a gradient of 1e-8 = 0",
        r"detected precision=fp16, loss_scale=none, at the start: .*gradients are FP16: those below 6e-8 vanish; use a",
        r"detected then the step is applied, .*grad_norm 0 .*the weight is still 1 ",
        r"fixed precision=fp16, its own loss scale of 65536: .*grad_norm 9.99\d+e-09; the weight moves to 0.9995",
        r"fixed precision=bf16, its own loss scale of 1: .*grad_norm 1.00\d+e-08; the weight moves to 0.9995",
    ],
    "A loss is not protected": [
        r"shown precision=fp16: the model's own loss of 300 x 300 = inf, torch.float16",
        r"detected engine.backward refuses it: the loss is torch.float16; the contract says float32",
        r"fixed precision=fp16, the loss of what the model returns.* 10 skips the step is applied, loss 90000 ",
        r"fixed precision=fp16, the model's own in dtrain.full_precision.* the step is applied, loss 90000 ",
    ],
    "A cast hides an overflow": [
        r"shown fp8 e4m3: Inf cast = 448",
        r"detected precision=fp8, one input of 256 is inf: the step is skipped, nonfinite_loss: forward loss is NaN",
        r"fixed precision=fp8, one input of 256 is 1: the step is applied, loss 16$",
    ],
    "A sum in reduced precision stops growing": [
        r"bf16: 4,096 ones added one by one = 256 .*fp16: 4,096 ones added one by one = 2,048",
        r"detected bf16: 93.8% is lost; .* lose 0.8% at most",
        r"fixed precision=bf16, a Linear of 4,096 ones, summed in FP32: 4,096",
    ],
}


@pytest.mark.parametrize("title", EXPECTED)
def test_failure_is_shown_detected_and_fixed(sections: dict[str, str], title: str) -> None:
    assert len(sections) == len(FAILURES) == len(EXPECTED)
    for pattern in EXPECTED[title]:
        assert re.search(pattern, sections[title]), f"{pattern}\nnot in\n{sections[title]}"


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
