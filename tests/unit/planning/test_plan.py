"""``dtrain plan precision`` and ``plan memory`` as users run them: they print, in little time and memory."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import nn

from dtrain.__main__ import main
from dtrain.cli.resolve import compose
from dtrain.config.schema import RunConfig
from dtrain.planning.devices import find_device
from dtrain.planning.planned_run import PlannedRun
from dtrain.planning.precision import show_plan
from tests.helpers.launch import ROOT


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["plan", *argv]) == 0
    return capsys.readouterr().out


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of the first table by their first cell."""
    table = text.partition("## Operations")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return {name: cells for name, *cells in rows[2:]}


def test_a_large_model_in_seconds_and_folded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    start = time.monotonic()
    words = ["launch.device=cpu", "precision=fp8", "model=llama-8b", f"run_dir={tmp_path / 'run'}"]
    text = output(capsys, "precision", *words, 'precision.rules={"blocks.0.*": bf16, "blocks.5.attn.out": fp32}')
    assert time.monotonic() - start < 30, "8G weights were drawn"
    rows = rows_of(text)
    assert rows["embed"] == ["Embedding", "320x4096", "bf16", "only a plain nn.Linear has FP8 products"]
    assert rows["blocks.0-31.attn_norm"] == ["RMSNorm", "4096", "fp32", "norm"]
    assert rows["blocks.0.attn.out"] == ["Linear", "4096x4096", "bf16", "rule 'blocks.0.*'"]
    assert rows["blocks.1-4,6-31.attn.out"][2:] == ["fp8", "[4096, 4096] are multiples of 16"]
    assert rows["blocks.1-31.ffn.down"][1:3] == ["4096x14336", "fp8"]
    assert rows["head"][2:] == ["bf16", "last product"]
    assert re.search(r"softmax, norms, losses, reductions, linalg *\| fp32", text)
    assert "e4m3 x e4m3, gradients e5m2 x e4m3, sums in fp32" in text
    assert not (tmp_path / "run").exists()


def test_other_precisions(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(*words: str) -> str:
        return output(capsys, "precision", "launch.device=cpu", "model=tiny", *words)

    rows = rows_of(shown("--all", "precision=bf16"))
    assert [name for name in rows if name.endswith("attn.qkv")] == [f"blocks.{i}.attn.qkv" for i in range(4)]
    assert re.search(r"\| all *\| fp32 *\|", shown("precision=fp32"))
    text = shown("precision=fp16")
    assert rows_of(text)["blocks.0-3.attn.out"][2:] == ["fp16", "policy"]
    assert re.search(r"products, convolutions, RNN cells, attention *\| fp16, sums in fp32", text)
    text = shown("precision=fp8", "precision.float8.choice=timed")
    assert rows_of(text)["blocks.0-3.attn.qkv"][2:] == ["fp8", "if timed faster than BF16 at the start"]
    assert re.search(r"\| 2048 x 256 -> 768 *\| 4 ", text.partition("## Timed at the start")[2])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    show_plan(RunConfig(), folded=True)
    assert "## Modules" not in capsys.readouterr().out, "on a terminal the table is drawn"


def build_from_values(config: object, vocab_size: int) -> nn.Module:
    model = nn.Sequential(nn.Embedding(vocab_size, 32), nn.Linear(32, 32), nn.Linear(32, vocab_size))
    assert model[1].weight.sum().item() != 0
    return model


@pytest.mark.exhaustive
def test_a_model_that_needs_values_gets_them(capsys: pytest.CaptureFixture[str]) -> None:
    factory = f"model.factory={__name__}:build_from_values"
    text = output(capsys, "precision", "launch.device=cpu", "precision=fp8", factory)
    assert rows_of(text)["1"][2] == "fp8"


def test_memory(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["experiment=smoke", "model.num_layers=1", "precision=bf16", "engine.zero_stage=3", "device=a100-80gb"]
    text = output(capsys, "memory", *keys, "ranks=6")
    assert "planned with train.global_batch_size=12: 6 ranks cannot share 8 in equal parts" in text
    assert "rank 0 of 6 on a100-80gb" in text
    assert re.search(r"\| unsharded +\| [0-9.]+ MiB +\| full weights", text)
    margin = r"\| margin +\| 500.00 MiB to [0-9.]+ GiB +\| the driver's context, kernels, fragments, NCCL"
    assert re.search(margin, text)
    assert re.search(r"fits on a100-80gb \(80.00 GiB for a rank\); the largest micro-batch that fits is \d{4}", text)


def test_a_batch_that_grows_is_planned_at_its_largest(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("train.global_batch_size={0:8,5:32}", "train.seq_len={0:16,5:32}")
    keys = ("experiment=smoke", "precision=fp32", "device=l4-24gb", "model.num_layers=1")
    text = output(capsys, "memory", *keys, *sizes)
    assert text.startswith("planned at the largest batch: train.global_batch_size=32 train.seq_len=32\n")
    grown = PlannedRun.of(compose(["experiment=smoke", *sizes]), find_device("l4-24gb", 1), 1)
    assert grown.config == compose(["experiment=smoke", "train.global_batch_size=32", "train.seq_len=32"])
    assert {tensor.shape for tensor in grown.batch.values()} == {(2, 32)}
    assert {tensor.shape for tensor in grown.with_micro_batch_size(2).batch.values()} == {(4, 32)}


@pytest.mark.parametrize(
    ("words", "suggested"),
    [
        ("memory devise=cpu", "device"),
        ("scale rank=8", "ranks"),
        ("shapes rankz=8", "ranks"),
        ("time netwrk=x", "network"),
    ],
)
def test_a_misspelled_key_of_the_plan_is_suggested(
    capsys: pytest.CaptureFixture[str], words: str, suggested: str
) -> None:
    assert main(["plan", *words.split()]) == 2
    assert f"did you mean '{suggested}'" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["cpu", "h100-80gb"])
def test_memory_with_an_optimizer_of_torch(capsys: pytest.CaptureFixture[str], where: str) -> None:
    words = ("optim=torch", "optim.factory=torch.optim:NAdam", "model.num_layers=1", "model.hidden_dim=64")
    assert f"fits on {where}" in output(capsys, "memory", *words, f"device={where}")


def test_memory_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["train.micro_batch_size=256", "train.global_batch_size=256", "model.num_layers=1", "device=t4-16gb"]
    text = output(capsys, "memory", "precision=fp32", "model=gpt2-124m", *sizes)
    assert "does not fit on t4-16gb (15.00 GiB for a rank); the largest micro-batch that fits is" in text
    assert re.search(r"with train.micro_batch_size=\d+: .*, fits; costs: \d+ times as many forwards", text)


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "found", "most_s", "most_bytes"),
    [
        ("plan memory device=h100-80gb ranks=64", "fits on h100-80gb", 30, 2 * 2**30),
        ("simulate precision=bf16 ranks=1024", "| 1,024 ", 60, 4e9),
    ],
)
def test_8g_parameters_take_little_time_and_memory(words: str, found: str, most_s: int, most_bytes: float) -> None:
    common = ("model=llama-8b", "engine.zero_stage=3", "train.micro_batch_size=1")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "dtrain", *words.split(), *common]
    text = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert found in text
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < most_s, "seconds of a core, which are more on a busy machine"
    assert after.ru_maxrss * 1024 < most_bytes  # the largest child so far
