"""``dtrain replay``: a failure of two ranks, reproduced on one from the nearest checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dtrain.__main__ import main
from dtrain.config.model import ModelConfig
from dtrain.data.sampling import sample_id
from dtrain.models import ModelOutput
from dtrain.models.causal_lm import causal_lm_output
from dtrain.precision.histogram import Histogram
from dtrain.tasks import IGNORE_INDEX
from tests.helpers.chat import masked_data
from tests.helpers.damage import R0, flip
from tests.helpers.launch import train
from tests.helpers.planted_faults import Root, Square
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

DIM, SEQ_LEN, NUM_SAMPLES, BATCH = 16, 16, 180, 4
FORWARD, BACKWARD = "#", "~"  # the markers of samples on which the model goes wrong
FACTORY = f"model.factory={__name__}:Planted"
OVERFLOW, ROOT = 11, 13  # steps of the planted faults
_TRAIN = "train.steps=14 train.micro_batch_size=1 train.log_every=1 train.save_every=6 train.eval_every=0"
_MORE = "train.eval_batches=1 train.sample_tokens=0 schedule.warmup_steps=2 precision=fp32 engine.zero_stage=3"
_FILES = "data=text data.validation_percent=0 checkpoint.keep_last=9 checkpoint.asynchronous=false"
_SIZES = (f"model.max_seq_len={SEQ_LEN}", f"train.global_batch_size={BATCH}", "launch.threads_per_rank=1")
SETTINGS = (FACTORY, *_TRAIN.split(), *_MORE.split(), *_FILES.split(), *_SIZES)


def write_text(file: Path, markers: dict[int, str]) -> str:
    """Writes training samples of which the one drawn at each global index of ``markers`` begins with its marker.

    The validation split takes one more window from the end.
    """
    samples = [f"{number:04d} and on " * SEQ_LEN for number in range(NUM_SAMPLES + 1)]
    for index, marker in markers.items():
        place = sample_id(0, index, NUM_SAMPLES)
        samples[place] = marker + samples[place]
    file.write_text("".join(sample[:SEQ_LEN] for sample in samples) + "..", encoding="ascii")
    return f"data.files={file}"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.linear = nn.Linear(DIM, DIM)
        self.dropout = nn.Dropout(0.1)
        self.square = Square()
        self.root = Root()

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        h = self.dropout(self.linear(self.norm(x)))
        factor = torch.where((tokens == ord(FORWARD)).any(1), 1e30, 1.0)
        h = self.square(h, factor[:, None, None])
        is_zero = (tokens == ord(BACKWARD)).any(1)[:, None, None]
        return x + self.root(h, is_zero)


class Planted(nn.Module):
    """A small language model that goes wrong on samples with a marker.

    A sample with ``#`` overflows in the forward of ``blocks.1.square``. One with ``~`` has a root at 0 in
    ``blocks.1.root``, whose forward is finite and whose gradient is not.
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, vocab_size)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> ModelOutput:
        x = self.blocks[0](self.embed(tokens), torch.zeros_like(tokens))
        return causal_lm_output(self.head(self.blocks[1](x, tokens)), targets)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reproducible run of two ranks that goes wrong on micro-batch 1 of rank 1, and on micro-batch 0 of rank 1."""
    folder = tmp_path_factory.mktemp("replay")
    markers = {(OVERFLOW - 1) * BATCH + 3: FORWARD, (ROOT - 1) * BATCH + 1: BACKWARD}
    data = write_text(folder / "text.txt", markers)
    assert train(folder / "run", *SETTINGS, data, "engine.reproducible=true", world=2) == [0, 0]
    return folder / "run"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _replay(rank: int, world: int, words: list[str], folder: str) -> tuple[int, str]:
    os.chdir(folder)
    log = os.open("output.txt", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = main(["replay", *words])
    return code, Path("output.txt").read_text(encoding="utf-8")


def replay(folder: Path, *words: str) -> tuple[int, str]:
    """The exit code and output of ``dtrain replay WORDS`` in a forked process."""
    folder.mkdir(exist_ok=True)
    results: list[tuple[int, str]] = run_ranks(1, _replay, [*words, f"code={FACTORY.partition('=')[2]}"], str(folder))
    return results[0]


def test_an_overflow_of_two_ranks_is_reproduced_on_one(run_dir: Path, tmp_path: Path) -> None:
    before = content(run_dir)
    code, output = replay(tmp_path, str(run_dir), f"step={OVERFLOW}")
    assert code == 0, output
    assert content(run_dir) == before, "nothing in the run has changed"
    assert "replayed steps 7 to 11 of" in output
    assert "from step-00000006 on 1 rank (the run had 2)" in output
    assert "losses, gradient norms and loss scales of 5 logged steps: equal bit for bit" in output
    assert f"culprit: the same as in failures/step-{OVERFLOW}.json" in output
    assert "first in the output of 'blocks.1.square' (Square)" in output
    dump = tmp_path / "runs" / f"replay-run-step-{OVERFLOW}"
    report = json.loads((dump / "replay.json").read_text())
    recorded = json.loads((run_dir / f"failures/step-{OVERFLOW}.json").read_text())["evidence"]
    # the origin's ranges too, because the forward has the same bits
    assert report["culprit"] == report["recorded"] == recorded
    assert (recorded["rank"], recorded["micro_batch"], recorded["phase"]) == (1, 1, "forward loss")
    assert (recorded["origin"]["module"], recorded["origin"]["place"]) == ("blocks.1.square", "output")
    own = report["result"]["culprit"]
    assert (own["rank"], own["micro_batch"]) == (0, 3), "in the ranks of the replay"
    check_dump(dump)


@pytest.mark.exhaustive
def test_a_step_of_a_batch_that_grows_is_reproduced(tmp_path: Path) -> None:
    data = write_text(tmp_path / "text.txt", {})
    sizes = ["train.global_batch_size={0: 2, 3: 4}", f"train.seq_len={{0: 4, 4: {SEQ_LEN}}}"]
    changed = ("train.steps=", "train.save_every=", "train.global_batch_size=")
    words = [word for word in SETTINGS if not word.startswith(changed)]
    words += [*sizes, "train.steps=5", "train.save_every=3", "engine.reproducible=true"]
    assert train(tmp_path / "run", *words, data, world=2) == [0, 0]
    code, output = replay(tmp_path / "out", str(tmp_path / "run"), "step=5", f"out={tmp_path / 'five'}")
    assert code == 0, output
    assert "replayed steps 4 to 5 of" in output
    assert "losses, gradient norms and loss scales of 2 logged steps: equal bit for bit" in output
    assert replay(tmp_path / "out", str(tmp_path / "run"), "step=4", f"out={tmp_path / 'four'}")[0] == 0
    for folder, length in (("four", 4), ("five", SEQ_LEN)):
        files = sorted((tmp_path / folder).glob("micro-batch-*.json"))
        texts = [json.loads(file.read_text())["text"] for file in files]
        assert [[len(row) for row in rows] for rows in texts] == [[length] * (SEQ_LEN // length)] * 4


def check_dump(dump: Path) -> None:
    records = [json.loads((dump / f"micro-batch-{index:03d}.json").read_text()) for index in range(BATCH)]
    assert [record["loss"] is None for record in records] == [False, False, False, True]
    assert records[3]["first_nonfinite"] == "output of 'blocks.1.square' (Square)"
    for index, record in enumerate(records):
        expected = [sample_id(0, (OVERFLOW - 1) * BATCH + index, NUM_SAMPLES)]
        tensors = load_file(dump / f"micro-batch-{index:03d}.safetensors")
        assert record["samples"] == tensors["sample_ids"].tolist() == expected
        assert bytes(tensors["tokens"][0].tolist()).decode() == record["text"][0]
        assert record["text"][0].startswith(FORWARD) == (index == 3)
        assert torch.equal(tensors["tokens"][0, 1:], tensors["targets"][0, :-1])
    found: dict[tuple[str, str], Any] = {(item["module"], item["side"]): item for item in records[0]["tensors"]}
    assert found["blocks.1.linear", "output"]["gradient"]["numel"] == SEQ_LEN * 16
    assert found["", "output"]["name"] == "output.loss"
    assert found["", "output"]["min"] == records[0]["loss"]
    assert records[0]["weights"]["head"][0]["name"] == "weight"
    gradients = load_file(dump / "gradients.safetensors")
    for item in json.loads((dump / "gradients.json").read_text()):
        gradient = gradients[item["name"]]
        assert item["num_nan"] == int(gradient.isnan().sum())
        assert Histogram.from_dict(item["histogram"]) == Histogram.of(gradient)


def test_micro_batches_weigh_by_their_targets_that_count(tmp_path: Path) -> None:
    small = "model.num_layers=1 model.hidden_dim=16 model.num_heads=2 model.max_seq_len=32 schedule.warmup_steps=0"
    sizes = "train.steps=2 train.log_every=1 train.eval_every=0 train.sample_tokens=0 train.micro_batch_size=1"
    words = [*small.split(), *sizes.split(), "train.global_batch_size=4", "precision=fp32", "launch.threads_per_rank=1"]
    assert train(tmp_path / "run", *masked_data(tmp_path / "data"), *words, "engine.reproducible=true") == [0]
    asked = [str(tmp_path / "run"), "step=2", f"out={tmp_path / 'out'}"]
    ((code, output),) = run_ranks(1, _replay, asked, str(tmp_path))
    assert code == 0, output
    report = json.loads((tmp_path / "out/replay.json").read_text())["result"]
    weights = [record["weight"] for record in report["micro_batches"]]
    for index, weight in enumerate(weights):
        targets = load_file(tmp_path / f"out/micro-batch-{index:03d}.safetensors")["targets"]
        assert weight == int((targets != IGNORE_INDEX).sum()) / targets.numel()
    assert len(set(weights)) > 1
    total = sum(record["weight"] * record["loss"] for record in report["micro_batches"])
    assert report["steps"][-1]["loss"] == pytest.approx(total / sum(weights))


def test_a_gradient_of_two_ranks_is_reproduced_on_two_processes(run_dir: Path, tmp_path: Path) -> None:
    code, output = replay(tmp_path, str(run_dir), f"step={ROOT}", "ranks=2", f"out={tmp_path / 'mine'}")
    assert code == 0, output
    assert "replayed step 13 of" in output
    assert "1 logged step: equal bit for bit" in output
    assert "local gradient of 'blocks.1.linear.bias'[0:16] not finite (16 NaN) on rank 1, micro-batch 0" in output
    assert "first in the input gradient of 'blocks.1.root' (Root), by its own backward" in output
    report = json.loads((tmp_path / "mine/replay.json").read_text())
    assert report["culprit"] == report["recorded"]


@pytest.mark.exhaustive
def test_a_damaged_checkpoint_is_left_and_the_one_before_used(run_dir: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(run_dir, tmp_path / "copied"))
    shutil.rmtree(copied / "checkpoints/step-00000006")
    flip(R0, 1.0)(copied / "checkpoints/step-00000012")
    before = content(copied)
    code, output = replay(tmp_path / "at", str(copied), "step=13")
    assert code == 0, output
    assert content(copied) == before
    assert "step-00000012 is not used: " in output
    assert "replayed steps 1 to 13 of" in output
    assert "from the seed on 1 rank" in output
    assert "13 logged steps: equal bit for bit" in output


def test_changed_data_is_refused(run_dir: Path, tmp_path: Path) -> None:
    file = run_dir.parent / "text.txt"
    text = file.read_text()
    file.write_text(text.replace("0007", "7000"))
    try:
        code, output = replay(tmp_path, str(run_dir), f"step={OVERFLOW}")
    finally:
        file.write_text(text)
    assert code == 2, output
    assert "dtrain: the data differs from the run's (sha256 " in output
    assert f"put the same files back under data.files={file}" in output
