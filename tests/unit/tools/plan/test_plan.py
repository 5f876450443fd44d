"""``dtrain plan precision`` as users run it: it prints the formats of a run and does nothing else."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dtrain.__main__ import main
from dtrain.cli.resolve import compose
from dtrain.config.schema import RunConfig
from dtrain.planning.devices import find_device
from dtrain.tools.plan.precision import show_plan
from dtrain.train.planned import PlannedRun
from tests.helpers.launch import ROOT


def planned(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[dict[str, list[str]], str]:
    """Returns the rows of the first table by module, and the whole output."""
    assert main(["plan", "precision", "launch.device=cpu", *argv]) == 0
    text = capsys.readouterr().out
    table = text.partition("## Operations")[0]
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line] for line in lines]
    return {name: cells for name, *cells in rows[2:]}, text


def test_a_large_model_in_seconds_and_folded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    was_initialized = torch.distributed.is_initialized()  # by another test
    start = time.monotonic()
    rules = 'precision.rules={"blocks.0.*": bf16, "blocks.5.attn.out": fp32}'
    rows, text = planned(capsys, "precision=fp8", "model=llama-8b", rules, f"run_dir={tmp_path / 'run'}")
    assert time.monotonic() - start < 30, "8G weights were drawn"
    assert rows["embed"] == ["Embedding", "320x4096", "bf16", "only a plain nn.Linear has FP8 products"]
    assert rows["blocks.0-31.attn_norm"] == ["RMSNorm", "4096", "fp32", "norm"]
    assert rows["blocks.0.attn.out"] == ["Linear", "4096x4096", "bf16", "rule 'blocks.0.*'"]
    assert rows["blocks.1-4,6-31.attn.out"][2:] == ["fp8", "[4096, 4096] are multiples of 16"]
    assert rows["blocks.5.attn.out"][2:] == ["fp32", "rule 'blocks.5.attn.out'"]
    assert rows["blocks.1-31.ffn.down"][1:3] == ["4096x14336", "fp8"]
    assert rows["head"][2:] == ["bf16", "last product"]
    assert len(rows) == 14
    assert re.search(r"softmax, norms, losses, reductions, linalg *\| fp32", text)
    assert "e4m3 x e4m3, gradients e5m2 x e4m3, sums in fp32" in text
    assert "float8: tensorwise, E5M2 gradients, emulated" in text
    assert "6.74G in fp8" in text
    assert not (tmp_path / "run").exists()
    assert torch.distributed.is_initialized() == was_initialized


def test_all_modules(capsys: pytest.CaptureFixture[str]) -> None:
    rows, _ = planned(capsys, "--all", "precision=bf16")
    assert [name for name in rows if name.endswith("attn.qkv")] == [f"blocks.{i}.attn.qkv" for i in range(4)]


def test_shapes_to_be_timed(capsys: pytest.CaptureFixture[str]) -> None:
    rows, text = planned(capsys, "precision=fp8", "precision.float8.choice=timed", "model.ffn_dim=100")
    assert rows["blocks.0-3.attn.qkv"][2:] == ["fp8", "if timed faster than BF16 at the start"]
    timed = text.partition("## Timed at the start")[2].partition("precision fp8 on cpu")[0]
    assert re.search(r"\| 2048 x 256 -> 768 *\| 4 ", timed)
    assert "100" not in timed or rows["blocks.0-3.ffn.down"][2] == "fp8"


def test_other_precisions(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = planned(capsys, "precision=fp32")
    assert re.search(r"\| all *\| fp32 *\|", text)
    rows, text = planned(capsys, "precision=fp16", "model=gpt2-124m")
    assert rows["blocks.0-11.ffn.up"] == ["Linear", "3072x768", "fp16", "policy"]
    assert re.search(r"products, convolutions, RNN cells, attention *\| fp16, sums in fp32", text)


def test_a_model_that_needs_values_gets_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_values.py").write_text(
        "from torch import nn\n"
        "def build(config, vocab_size):\n"
        "    model = nn.Sequential(nn.Embedding(vocab_size, 32), nn.Linear(32, 32), nn.Linear(32, vocab_size))\n"
        "    assert model[1].weight.sum().item() != 0\n"
        "    return model\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    rows, _ = planned(capsys, "precision=fp8", "model.factory=needs_values:build")
    assert rows["1"][2] == "fp8"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["speed"], "dtrain plan cannot plan 'speed'; valid: memory, precision, shapes"),
        (["memory", "device=h100-80g"], "device=h100-80g is not known; did you mean 'h100-80gb'?"),
        (["memory", "rank=4"], "unknown key 'rank'; did you mean"),
        (["memory", "ranks=0"], "ranks=0 must be a whole number from 1"),
        (["memory", "ranks=8", "shard_size=4"], "shard_size=4 is a key of the engine: write engine.shard_size=4"),
        (["memory", "ranks=8", "engine.shard_size=3"], "engine.shard_size=3 does not divide the number of ranks, 8"),
        (["memory", "--all"], "dtrain plan memory has no option --all"),
        (["memory", "--against"], "--against needs the folder of a run"),
        (["memory", "--against", "none"], "none/memory.json: expected the memory.json that a run writes at its end"),
        (["memory", "--against", "none", "ranks=2"], "--against takes the configuration of the run; remove ranks"),
        (["shapes", "--against", "none"], "dtrain plan shapes has no option --against"),
        (["precison"], "dtrain plan cannot plan 'precison'; did you mean 'precision'?"),
        (["precision", "precision=tf32", "launch.device=cpu"], "precision=tf32 needs an NVIDIA GPU of Ampere or later"),
        (["precision", "precision.rules={hed:fp32}"], "precision rule 'hed' matches no module; did you mean 'head'?"),
        (["precision", "precision=fp8", "engine=deepspeed"], "engine=deepspeed cannot do precision=fp8"),
        (["precision", "precision=nvfp4"], "precision=nvfp4: nvfp4 needs the FP4 Tensor Cores of Blackwell"),
        (["precision", "-m", "precision=fp8,bf16"], "dtrain plan precision shows one run; remove --multirun"),
        (["precision", "--al"], "unknown option '--al'"),
    ],
)
def test_refusals_are_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert main(["plan", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"dtrain: {message}")
    assert captured.err.count("\n") == 1


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"]):
        assert main(["plan", *argv]) == 0
        assert capsys.readouterr().out.startswith("usage: dtrain plan memory|shapes|time|precision [option ...]")
    for argv in (["memory", "--help"], ["precision", "-h"]):
        assert main(["plan", *argv]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: dtrain plan {argv[0]} ")
        assert "  network=FILE " in shown.partition("Of dtrain plan itself:")[2]


def test_on_a_terminal_the_table_is_drawn(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    show_plan(RunConfig(), folded=True)
    assert "## Modules" not in capsys.readouterr().out


def test_memory(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["experiment=smoke", "precision=bf16", "engine.zero_stage=3", "ranks=6", "device=a100-80gb"]
    assert main(["plan", "memory", *keys]) == 0
    text = capsys.readouterr().out
    assert "planned with train.global_batch_size=12: 6 ranks cannot share 8 in equal parts" in text
    assert "rank 0 of 6 on a100-80gb" in text
    assert re.search(r"\| unsharded +\| [0-9.]+ MiB +\| full weights", text)
    assert re.search(
        r"\| margin +\| 500.00 MiB to [0-9.]+ GiB +\| the driver's context, kernels, fragments, NCCL", text
    )
    assert re.search(r"fits on a100-80gb \(80.00 GiB for a rank\); the largest micro-batch that fits is \d{4}", text)


def test_a_batch_that_grows_is_planned_at_its_largest(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("train.global_batch_size={0:8,5:32}", "train.seq_len={0:16,5:32}")
    assert main(["plan", "memory", "experiment=smoke", "precision=fp32", "device=l4-24gb", *sizes]) == 0
    text = capsys.readouterr().out
    assert text.startswith("planned at the largest batch: train.global_batch_size=32 train.seq_len=32\n")
    grown = PlannedRun.of(compose(["experiment=smoke", *sizes]), find_device("l4-24gb", 1), 1)
    assert grown.config == compose(["experiment=smoke", "train.global_batch_size=32", "train.seq_len=32"])
    assert {tensor.shape for tensor in grown.batch.values()} == {(2, 32)}
    assert {tensor.shape for tensor in grown.with_micro_batch_size(2).batch.values()} == {(4, 32)}


def test_memory_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["precision=fp32", "train.micro_batch_size=256", "train.global_batch_size=256", "model=gpt2-124m"]
    assert main(["plan", "memory", *keys, "model.num_layers=2", "device=t4-16gb"]) == 0
    text = capsys.readouterr().out
    assert "does not fit on t4-16gb (15.00 GiB for a rank); the largest micro-batch that fits is" in text
    assert re.search(r"with train.micro_batch_size=\d+: .*, fits; costs: \d+ times as many forwards", text)


def test_memory_of_replicas_of_fewer_ranks_than_all(capsys: pytest.CaptureFixture[str]) -> None:
    def rows(*keys: str) -> dict[str, str]:
        words = ["plan", "memory", "experiment=smoke", "device=l4-24gb", "engine.zero_stage=2", *keys]
        assert main(words) == 0
        lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
        return {cells[1].strip(): cells[2].strip() for cells in lines}

    replicas, plain = rows("ranks=8", "engine.shard_size=2"), rows("ranks=2")
    assert {kind: replicas[kind] for kind in ("master", "moments")} == {
        kind: plain[kind] for kind in ("master", "moments")
    }


@pytest.mark.exhaustive
@pytest.mark.processes
def test_8g_parameters_are_planned_in_little_time_and_memory() -> None:
    words = ["plan", "memory", "model=llama-8b", "device=h100-80gb", "ranks=64", "engine.zero_stage=3"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "dtrain", *words, "train.micro_batch_size=1"]
    text = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "fits on h100-80gb" in text
    assert after.ru_utime - before.ru_utime < 20, "seconds of a core"
    assert after.ru_maxrss * 1024 < 2 * 2**30  # the largest child so far
