"""README.md is true: its commands run, its figures are the recorded ones, and it has each promise."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dtrain.__main__ import main
from tests.helpers.chat import masked_data
from tests.helpers.hf_models import save_hf
from tests.helpers.launch import LAUNCHER, ROOT, Job, slurm_job
from tests.helpers.promises import FAULTS_OF, counts, rows
from tests.helpers.ranks import run_ranks
from tests.helpers.speed_ups import SHAPES, cell

README = (ROOT / "README.md").read_text(encoding="utf-8")
WANTED = dict(re.findall(r"^\| ([^|]+?) +\| `(.+?)` +\| \[", README, re.MULTILINE))
_SHORT = "train.steps=2 train.micro_batch_size=1 train.global_batch_size=2 train.eval_batches=1 report=false"
_SMALL = "model.num_layers=1 model.hidden_dim=32 model.num_heads=2 model.max_seq_len=32"
# What each command gets more, so that it ends in seconds, and the file that it has to write.
MORE = {
    "train on my own text": (f"{_SHORT} {_SMALL}", "runs/mine/summary.json"),
    "train a model of Hugging Face": (f"{_SHORT} model.max_seq_len=32 run_dir=out", "out/summary.json"),
    "train adapters (LoRA)": (f"{_SHORT} model.max_seq_len=32 run_dir=out", "out/summary.json"),
    "train on my images": (f"{_SHORT} run_dir=out", "out/summary.json"),
    "write my own loop": ("--steps 2", "runs/spirals/step-00000002/manifest.json"),
    "keep my `Trainer` script": ("--max_steps 2", "out/checkpoint-2/trainer_state.json"),
    "use more ranks": (f"{_SHORT} {_SMALL} run_dir=out", "out/summary.json"),
    "use nodes of SLURM": (f"{_SHORT} {_SMALL} run_dir=out", "out/summary.json"),
    "train in FP8": (f"{_SHORT} {_SMALL} run_dir=out", "out/summary.json"),
    "know whether it fits": ("", "."),
    "know whether a format is safe": (
        f"{_SMALL} steps=8 seeds=2 train.micro_batch_size=2 train.global_batch_size=4 run_dir=out",
        "out/probe.json",
    ),
    "know why a step was skipped": ("out=out", "out/replay.json"),
    "profile a step": (
        f"{_SMALL} bench.precisions=[fp32] bench.steps=1 bench.warmup_steps=1 bench.out=out.json",
        "out.json",
    ),
    "export to Hugging Face": ("", "exported/model.safetensors"),
    "track it": (f"{_SHORT} {_SMALL} run_dir=out", "out/wandb"),
}
SLOW = ("use nodes of SLURM", "know whether it fits", "train adapters (LoRA)")  # other tests try them in short


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a reader has: a text, conversations, images, models."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "corpus").mkdir()
    (folder / "corpus/a.txt").write_text("It was a bright cold day in April. " * 200, encoding="utf-8")
    (folder / "corpus/b.txt").write_text("The clocks were striking thirteen. " * 200, encoding="utf-8")
    masked_data(folder / "qwen3")
    (folder / "chat").mkdir()
    (folder / "qwen3/talks.jsonl").rename(folder / "chat/talks.jsonl")
    save_hf(folder / "qwen3", "qwen3", vocab_size=259)
    for number in range(24):
        path = folder / f"photos/{'ab'[number % 2]}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 40, 3), 10 * number, np.uint8)).save(path)
    model = "from tests.helpers.probed_models import build\n"
    (folder / "my_model.py").write_text(model, encoding="utf-8")
    return folder


def run(rank: int, world: int, folder: Path, words: list[str]) -> int:
    """Runs one command in ``folder`` as a shell of a reader would."""
    for variable in LAUNCHER:
        os.environ.pop(variable, None)
    os.environ["WANDB_MODE"] = "offline"
    os.chdir(folder)
    sys.path.insert(0, "")
    if words[0] == "dtrain":
        return main(words[1:])
    sys.argv = [str(ROOT / words[1]), *words[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


@pytest.mark.processes
@pytest.mark.parametrize(
    "wish", [pytest.param(wish, marks=pytest.mark.exhaustive) if wish in SLOW else wish for wish in MORE]
)
def test_the_command_of_a_wish_runs(wish: str, prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    words, (more, file) = shlex.split(WANTED[wish]), MORE[wish]
    if words[0] == "sbatch":  # the nodes are two tasks here
        argv = [word for word in words[2:] if not word.startswith(("--", "launch/", "run_dir="))]
        command = ["bash", str(ROOT / "launch/slurm.sbatch"), *argv, *more.split()]
        with Job(command, tmp_path, slurm_job(tmp_path, 1)) as job:
            assert job.wait() == 0, job.output
    else:
        if "runs/mine" in words:  # the run of the first rows
            train = f"dtrain train data=text data.files=corpus/*.txt run_dir=runs/mine {_SHORT} {_SMALL}"
            assert run_ranks(1, run, tmp_path, train.replace("steps=2", "steps=3").split()) == [0]
        assert run_ranks(1, run, tmp_path, [*words, *more.split()]) == [0]
    assert (tmp_path / file).exists(), sorted(tmp_path.rglob("*"))


def test_every_wish_has_a_test() -> None:
    assert WANTED.keys() == MORE.keys()
    assert len(WANTED) == 15


def test_each_promise_has_its_line() -> None:
    lines = re.findall(r"^- \[(P\d+)\]\(docs/trust/reliability\.md(#.+?)\) (.+)$", README, re.MULTILINE)
    cells = [promise.strip("*").split(" ", 1) for promise, _, _ in rows().values()]
    assert [[number, f"[{title}]({anchor})"] for number, anchor, title in lines] == cells


def test_figures_of_faults_are_the_recorded_ones() -> None:
    recorded = counts()
    assert f"In {recorded[FAULTS_OF['P2']]:,} trials" in README
    assert f"{recorded[FAULTS_OF['P5']]} combinations" in README
    assert f"{sum(recorded.values()) // 1000 * 1000:,} planted faults" in README


def test_speed_ups_are_those_of_the_stored_results() -> None:
    peers = {"DDP": "ddp", "FSDP2, not resharded": "fsdp2_no_reshard", "DeepSpeed": "deepspeed_2"}
    for name, peer in peers.items():
        stage_2 = [cell(peer, shape).split(", ")[1] for shape in SHAPES]
        assert f"| {name} | {' | '.join(stage_2)} |" in README
