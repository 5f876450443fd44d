"""A run with compiled blocks: what is measured, audited, reported and replayed, and what is refused at its start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.cli.resolve import compose
from dtrain.errors import ConfigError
from dtrain.models import build_model
from dtrain.telemetry.metrics import read_metrics
from dtrain.telemetry.precision_files import read_sample
from dtrain.tools.replay.run import replay
from dtrain.tools.replay.source import read_run
from dtrain.train.run import run_training
from dtrain.train.setup import check_patterns
from tests.helpers import planted_faults as planted

_KEYS = (
    *("experiment=smoke", "launch.device=cpu", "launch.threads_per_rank=1", "supervise.enabled=false", "report=false"),
    *("model.num_layers=1", "model.hidden_dim=32", "model.num_heads=2", "model.max_seq_len=16"),
    *("train.micro_batch_size=2", "train.global_batch_size=4", "train.steps=3", "train.log_every=1"),
    *("train.eval_every=0", "train.eval_batches=1", "train.save_every=0", "train.sample_tokens=0"),
    "model.compile=blocks",
)


@pytest.mark.compile
def test_a_compiled_run_is_measured_audited_and_replayed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    keys = ("precision=fp8", "telemetry.precision_every=2", "telemetry.activations=[blocks.*]", "audit.replay_every=2")
    config = compose([*_KEYS, *keys, f"run_dir={path}"])
    run_training(config)
    lines = read_metrics(path / "metrics.jsonl")
    graphs = [line["compiled_graphs"] for line in lines if "lr" in line]
    assert graphs == [1, 2, 2]  # the audit of step 2 takes deterministic kernels, so its code is another
    assert [line["step"] for line in lines if "precision" in line] == [2]
    report = read_sample(path / "precision" / "step-2.json").report
    assert [measured.module for measured in report.activations] == ["blocks.0"]
    assert len(report.parameters) == len(list(build_model(config.model, 256, 0).parameters()))
    found, _ = replay(read_run(path, 3), out=tmp_path / "replay")
    assert found.num_compared == 3
    assert not found.differences


class _Squares(nn.Module):
    """Two blocks, the second of which overflows FP32 for the trigger of :mod:`tests.helpers.planted_faults`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.head = nn.Linear(planted.DIM, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        large = torch.where((x == planted.TRIGGER).any(), 1e30, 1.0)
        h = self.blocks[0](torch.where(x == planted.TRIGGER, 1.0, x), torch.ones(()))
        return {"loss": (self.head(self.blocks[1](h, large)).squeeze(-1) - y).square().mean()}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(planted.DIM, planted.DIM)
        self.square = planted.Square()

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return self.square(self.linear(x), factor)


@pytest.mark.exhaustive
@pytest.mark.compile
def test_an_explained_skip_names_the_compiled_block() -> None:
    engine = planted.start("", _Squares(), blocks=dtrain.Blocks(compile="blocks", recompute="selective"))
    engine.explain_skips = True
    origin = planted.culprit_of(planted.train(engine)).origin
    assert origin is not None
    assert (origin.place, origin.module, origin.class_name) == ("output", "blocks.1", "_Block")
    assert engine.compiled_graphs > 0


def test_activations_inside_of_compiled_blocks_are_refused() -> None:
    def check(activations: str, *more: str) -> None:
        config = compose([*_KEYS, f"telemetry.activations=[{activations}]", *more])
        check_patterns(config, build_model(config.model, 256, 0))

    check("blocks.*,head")
    check("blocks.*.attn", "model.compile=none")
    with pytest.raises(ConfigError, match=r"telemetry.activations: '\*.attn' matches only .* name blocks, .*blocks.0"):
        check("blocks.0,'*.attn'")
