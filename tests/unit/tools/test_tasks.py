"""The tools on images, which have no tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtrain.__main__ import main

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]

_DIGITS = "data.characters=digits data.size=12 model.hidden_dim=8"
_QUICK = (
    "launch.device=cpu launch.threads_per_rank=1 train.micro_batch_size=4 train.global_batch_size=8 "
    "schedule.warmup_steps=1"
)


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def dtrain(capfd: pytest.CaptureFixture[str], words: str) -> str:
    """The output of a command that succeeds."""
    assert main(words.split()) == 0
    return capfd.readouterr().out


def test_a_run_is_verified_and_replayed(capfd: pytest.CaptureFixture[str]) -> None:
    options = "precision=fp32 train.steps=3 train.log_every=1 run_dir=run report=false train.save_every=2"
    dtrain(capfd, f"train experiment=glyphs {_DIGITS} {_QUICK} {options} optim.compile=false train.eval_batches=2")
    verified = dtrain(capfd, "checkpoint verify run")
    assert [line.split()[:2] for line in verified.splitlines()] == [["ok", "step-00000002"], ["ok", "step-00000003"]]
    replayed = dtrain(capfd, "replay run step=3 out=replayed")
    assert "replayed step 3 of run from step-00000002" in replayed.replace("run/checkpoints/", "")
    assert "losses, gradient norms and loss scales of 1 logged step: equal bit for bit" in replayed
    record = json.loads(Path("replayed/micro-batch-000.json").read_text(encoding="utf-8"))
    assert len(record["text"]) == 4
    assert set(record["text"]) <= set("0123456789")
