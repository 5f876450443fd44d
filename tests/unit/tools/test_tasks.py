"""The tools on images and numbers, which have no tokens: a run and what looks at it, plans, probe and parity."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dtrain.__main__ import main
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

_DIGITS = ("data.characters=digits", "data.size=12", "model.hidden_dim=8")
_QUICK = ("launch.device=cpu", "launch.threads_per_rank=1", "train.micro_batch_size=4", "train.global_batch_size=8")
_OWN = "model.factory=tests.helpers.own_models:plain"


def _commands(rank: int, world: int, folder: str, commands: list[list[str]]) -> list[tuple[int, str]]:
    """Runs ``dtrain`` with each list of arguments; returns exit codes and outputs."""
    os.chdir(folder)
    results = []
    for number, words in enumerate(commands):
        log = os.open(f"output-{number}.txt", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = main(words)
        print(end="", flush=True)
        results.append((code, Path(f"output-{number}.txt").read_text(encoding="utf-8")))
    return results


def dtrain(folder: Path, *commands: list[str]) -> list[str]:
    """The outputs of commands that succeed, one after the other in a forked process."""
    (results,) = run_ranks(1, _commands, str(folder), list(commands))
    for code, output in results:
        assert code == 0, output
    return [output for _, output in results]


def test_a_run_is_verified_and_replayed(tmp_path: Path) -> None:
    train = ["train", "experiment=glyphs", *_DIGITS, *_QUICK, "precision=fp32", "train.steps=3", "train.log_every=1"]
    train += ["run_dir=run", "report=false", "train.save_every=2", "optim.compile=false", "train.eval_batches=2"]
    _, verified, replayed = dtrain(
        tmp_path, train, ["checkpoint", "verify", "run"], ["replay", "run", "step=3", "out=replayed"]
    )
    assert [line.split()[:2] for line in verified.splitlines()] == [["ok", "step-00000002"], ["ok", "step-00000003"]]
    assert "replayed step 3 of run from step-00000002" in replayed.replace("run/checkpoints/", "")
    assert "losses, gradient norms and loss scales of 1 logged step: equal bit for bit" in replayed
    record = json.loads((tmp_path / "replayed" / "micro-batch-000.json").read_text(encoding="utf-8"))
    assert len(record["text"]) == 4
    assert set(record["text"]) <= set("0123456789")


def test_plans_name_samples_and_outputs(tmp_path: Path) -> None:
    glyphs = ["data=glyphs", *_DIGITS[:2], "model.args.more_outputs=0", *_QUICK, "precision=bf16"]
    regression = ["experiment=regression", *_QUICK, "precision=bf16", "model.hidden_dim=36"]
    formats, memory, shapes, hidden = dtrain(
        tmp_path,
        ["plan", "precision", "experiment=glyphs", *_DIGITS, *_QUICK, "precision=bf16"],
        ["plan", "memory", *regression],
        ["plan", "shapes", _OWN, *glyphs],
        ["plan", "shapes", *regression],
    )
    assert [line for line in formats.splitlines() if line.startswith("| model.stem_norm ") and "fp32" in line]
    assert [line for line in formats.splitlines() if line.startswith("| model.head ") and "16x32" in line]
    assert "micro-batch that fits is" in memory
    assert "vocabulary" not in shapes
    assert "max_seq_len" not in shapes + hidden
    assert "| outputs 10 " in shapes
    assert [line for line in hidden.splitlines() if line.startswith("| hidden_dim 36 ") and "model.hidden_dim" in line]


def test_formats_are_probed(tmp_path: Path) -> None:
    (output,) = dtrain(
        tmp_path,
        [
            *("probe", "steps=8", "seeds=2", "formats=[bf16]", "run_dir=probed", "schedule.warmup_steps=2", *_QUICK),
            *("data=friedman", "data.samples=200", "model=mlp", "model.hidden_dim=16", "model.num_layers=2"),
        ],
    )
    assert "bf16 ends" in output
    assert output.splitlines()[-1] == "precision=bf16"


def test_engines_agree_on_a_convolutional_network(tmp_path: Path) -> None:
    words = ["steps=3", "micro_batch_size=4", "global_batch_size=8", "ranks=1", "device=cpu", "engines=[native]"]
    parity = [f"parity.{word}" for word in words]
    (output,) = dtrain(
        tmp_path,
        ["parity", "precision=fp32", "data=glyphs", "model=convnet", *_DIGITS, *parity, "schedule.warmup_steps=1"],
    )
    assert "native agrees with the oracle" in output
