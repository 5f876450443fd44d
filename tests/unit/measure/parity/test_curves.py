"""``dtrain parity parity.reference=cpu``: a case that fails costs only itself, and what is done is not done again."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from dtrain.__main__ import main
from dtrain.config.model import ModelConfig
from dtrain.measure.parity import worker
from dtrain.models import transformer
from tests.unit.measure.parity.test_parity import TINY

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]


def build(config: ModelConfig, vocab_size: int) -> nn.Module:
    """The default model; build number ``args.bad`` of all processes fails as ``args.how`` says."""
    file, bad, how = (config.args[name] for name in ("file", "bad", "how"))
    with Path(file).open("a", encoding="utf-8") as builds:
        builds.write("x")
    if Path(file).stat().st_size == bad:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the reason")
    if how == "hangs":  # what follows is as on a GPU after an illegal access
        worker._works = lambda device: False
    return transformer.build(replace(config, args={}), vocab_size)


def run(tmp_path: Path, how: str, *words: str, bad: int = 3) -> tuple[int, dict[str, Any], int]:
    """Returns the exit code, the report, and the number of models that were built so far."""
    file = tmp_path / "builds"
    model = [f"model.factory={__name__}:build", f"model.args={{file: {file}, bad: {bad}, how: {how}}}"]
    cases = ["parity.reference=cpu", "parity.engines=[native,ddp]", "parity.precisions=[fp32,tf32,bf16]"]
    code = main(["parity", *TINY, *model, *cases, "parity.ranks=1", f"run_dir={tmp_path / 'run'}", *words])
    report = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))
    return code, report, file.stat().st_size


FP32, BF16, DDP32, DDP16 = ("native", "fp32"), ("native", "bf16"), ("ddp", "fp32"), ("ddp", "bf16")


@pytest.mark.parametrize(
    ("how", "reason"), [("raises", "RuntimeError: the reason"), ("dies", "rank 0 was ended by SIGKILL: ")]
)
def test_a_case_that_fails_costs_only_itself_and_is_trained_again(how: str, reason: str, tmp_path: Path) -> None:
    code, report, builds = run(tmp_path, how)
    rows = {(row["engine"], row["precision"]): row for row in report["rows"]}
    assert list(rows) == [("native", "tf32"), ("ddp", "tf32"), FP32, BF16, DDP32, DDP16]
    assert [row["status"] for row in rows.values()] == ["left out"] * 2 + ["agrees", "failed", "agrees", "agrees"]
    assert "needs an NVIDIA GPU" in rows["native", "tf32"]["reason"]
    assert rows[BF16]["reason"].startswith(reason)
    assert (rows[BF16]["deviation"], rows[BF16]["zero_stage"]) == (None, 2)
    assert rows[FP32]["losses"] == report["reference"], "the reference is this case"
    assert 0 < rows[DDP16]["deviation"] < rows[DDP16]["bound"] == 5e-3
    assert (code, report["agrees"], builds) == (1, False, 5)
    code, report, builds = run(tmp_path, how)
    assert [row["status"] for row in report["rows"]] == ["left out"] * 2 + ["agrees"] * 4
    assert (code, report["agrees"], builds) == (0, True, 6), "only the case that failed"
    assert main(["parity", *TINY, "parity.reference=cpu", f"run_dir={tmp_path / 'run'}"]) == 2, "another configuration"


def test_a_device_that_does_not_answer_is_left_to_new_processes(tmp_path: Path) -> None:
    words = ["parity.engines=[native]", "parity.stages=[2,3,0,1]", "parity.precisions=[fp32]", "parity.loss_bound=0"]
    code, report, builds = run(tmp_path, "hangs", *words, bad=0)
    status = ["agrees", "agrees", "agrees", "left out"]
    assert [(row["zero_stage"], row["status"]) for row in report["rows"]] == list(
        zip([2, 3, 0, 1], status, strict=True)
    )
    assert report["rows"][-1]["reason"] == "the ranks of its engine have failed 3 times"
    assert (code, builds) == (0, 4)


def test_losses_beyond_their_bound_deviate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parity.engines=[native]", "parity.precisions=[bf16]", "parity.loss_bound=1e-9"]
    code, report, _ = run(tmp_path, "raises", *words, bad=0)
    (row,) = report["rows"]
    assert (code, row["status"], row["bound"]) == (1, "deviates", 1e-9)
    assert row["reason"] == f"the loss is off by {row['deviation']:.2g}, first beyond 1e-09 at step 1"
    assert f"native bf16, stage 2 deviates: {row['reason']}" in capsys.readouterr().out
