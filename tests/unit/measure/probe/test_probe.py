"""``dtrain probe`` as a whole: mistakes on the command line, a tiny run, and the files that it writes."""

from __future__ import annotations

import base64
import json
import math
import re
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.__main__ import main
from dtrain.config.dump import from_plain
from dtrain.measure.noise import Noise
from dtrain.measure.probe.cli import PAGE_FILE, PICTURE_FILE, REPORT_FILE
from dtrain.measure.probe.records import Analysis, Trial
from dtrain.measure.probe.report import ConstantScale
from dtrain.measure.probe.sections import rank_correlation
from dtrain.precision.histogram import Histogram
from dtrain.telemetry.envelope import Envelope
from dtrain.telemetry.metrics import CONFIG_FILE
from tests.helpers.probed_models import FACTORY, ODD_NAME, TINY


def test_fp32_that_diverges_ends_the_probe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["probe", *TINY, "optim=sgd", "optim.lr=1e30", "optim.max_grad_norm=null", f"run_dir={tmp_path}"]
    assert main([*argv, "formats=[bf16]"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("dtrain: FP32, the reference, fails: ")
    assert "8 steps have gradients that overflow" in error
    assert "lower optim.lr" in error


CANARY = "canary-5ec2e7"
SECRETS = [f"model.args.api_key={CANARY}", f"model.args.hub={{token: {CANARY}, url: 'https://me:{CANARY}@x.org'}}"]


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a probe of a user's model that overflows FP16, and what it printed."""
    folder = tmp_path_factory.mktemp("probe")
    with pytest.MonkeyPatch.context() as patch, (folder / "out").open("w+", encoding="utf-8") as out:
        patch.setattr("sys.stdout", out)
        run_dir = folder / "run"
        argv = ["probe", *TINY, FACTORY, "model.args.kind=overflow", "optim=lion", f"run_dir={run_dir}", *SECRETS]
        assert main(argv) == 0
    return run_dir, (folder / "out").read_text(encoding="utf-8")


def test_the_last_line_can_be_pasted(probed: tuple[Path, str]) -> None:
    _, printed = probed
    assert re.fullmatch(r"precision=\w+( .*)?", printed.splitlines()[-1])
    assert "Detection limit: " in printed
    (row,) = [line for line in printed.splitlines() if line.startswith("| fp16 ") and "fails" in line]
    assert "forward loss is" in row


def test_json_holds_all_records(probed: tuple[Path, str]) -> None:
    folder, printed = probed
    values: dict[str, Any] = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
    assert values["version"] == 1
    trials = [from_plain(Trial, entry) for entry in values["trials"]]
    assert [trial.format for trial in trials] == ["fp32", "bf16", "fp16", "fp8"]
    assert [len(trial.losses) for trial in trials] == [8, 8, 0, 8]
    assert values["trials"][2]["gap"] is None  # JSON has no infinity
    bf16 = trials[1]
    assert bf16.gap == pytest.approx(sum(bf16.losses[-2:]) / 2 - sum(trials[0].losses[-2:]) / 2)
    noise = from_plain(Noise, values["noise"])
    assert values["unit"] == pytest.approx(noise.unit)
    assert [run["change"] for run in values["noise_runs"]] == ["weights an ulp away", "seed 1", "seed 2"]
    assert values["advice"]["line"] == printed.splitlines()[-1]
    assert set(values["seconds"]) == {"trials", "noise", "analysis", "advice"}
    analysis = values["analysis"]
    assert {entry["module"] for entry in analysis["products"]} >= {f"layers.{ODD_NAME}", "head"}
    gradients = {name: Histogram.from_dict(entry) for name, entry in analysis["gradients"].items()}
    assert gradients["head.weight"].total == 4 * 257 * 16  # micro-batches of the first and the last step
    assert Envelope.read(folder / REPORT_FILE) == Envelope.of(gradients)


def test_no_file_holds_a_secret_and_the_page_is_self_contained_and_escaped(probed: tuple[Path, str]) -> None:
    folder, printed = probed
    files = [*folder.glob("*.json"), *folder.glob("*.html"), *folder.glob("*.yaml")]
    assert {path.name for path in files} == {REPORT_FILE, PAGE_FILE, CONFIG_FILE}
    assert [path.name for path in files if CANARY in path.read_text(encoding="utf-8")] == []
    assert CANARY not in printed
    command = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))["command"]
    assert "model.args.api_key=***" in command
    assert "model.args.kind=overflow" in command
    page = (folder / PAGE_FILE).read_text(encoding="utf-8")
    assert base64.b64encode((folder / PICTURE_FILE).read_bytes()).decode() in page
    assert (ODD_NAME in page, escape(ODD_NAME) in page, "<script" in page) == (False, True, False)
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!data:)", page)


def test_constant_scale_with_its_evidence() -> None:
    gradients = torch.tensor([2.0**-30] * 2 + [2.0**-20] * 5 + [0.75 * 2.0**-5] + [0.0] * 4)
    analysis = Analysis((), {"weight": Histogram.of(gradients)}, loss_scale=2.0**17)
    scale = ConstantScale.of(analysis)
    assert scale is not None
    assert (scale.top_exponent, scale.flushed_unscaled, scale.flushed) == (-6, 0.25, 0.0)
    assert scale.margin == pytest.approx(65504 / 2**12)
    assert "grow 16 times" in str(scale)
    assert ConstantScale.of(Analysis(())) is None


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, math.inf]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 1, 2], [1, 2, 3]) == pytest.approx(math.sqrt(3) / 2)
    assert rank_correlation([1, 2], [1, 2]) is None
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
