"""A run on images, which have no tokens, and the tools that look at it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtrain.__main__ import main

TRAIN = """train experiment=glyphs data.characters=digits data.size=12 model.hidden_dim=8 optim.compile=false
launch.device=cpu launch.threads_per_rank=1 train.micro_batch_size=4 train.global_batch_size=8 train.eval_batches=2
precision=fp32 schedule.warmup_steps=1 train.steps=3 train.log_every=1 train.save_every=2 report=false run_dir=run"""


@pytest.mark.processes
@pytest.mark.usefixtures("warm_ranks")
def test_a_run_is_verified_and_replayed(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    def dtrain(words: str) -> str:
        assert main(words.split()) == 0
        return str(capfd.readouterr().out)

    monkeypatch.chdir(tmp_path)
    dtrain(TRAIN)
    verified = dtrain("checkpoint verify run")
    assert [line.split()[:2] for line in verified.splitlines()] == [["ok", "step-00000002"], ["ok", "step-00000003"]]
    replayed = dtrain("replay run step=3 out=replayed")
    assert "replayed step 3 of run from step-00000002" in replayed.replace("run/checkpoints/", "")
    assert "losses, gradient norms and loss scales of 1 logged step: equal bit for bit" in replayed
    record = json.loads(Path("replayed/micro-batch-000.json").read_text(encoding="utf-8"))
    assert len(record["text"]) == 4
    assert set(record["text"]) <= set("0123456789")
