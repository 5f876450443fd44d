"""A run with compiled blocks: what is measured, audited, reported and replayed, and what is refused at its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.cli.resolve import compose
from dtrain.errors import ConfigError
from dtrain.measure.replay.run import replay
from dtrain.measure.replay.source import read_run
from dtrain.models import build_model
from dtrain.telemetry.metrics import read_metrics
from dtrain.telemetry.precision_files import read_sample
from dtrain.train.run import run_training
from dtrain.train.setup import check_patterns

_KEYS = (
    *("experiment=smoke", "launch.device=cpu", "launch.threads_per_rank=1", "supervise.enabled=false", "report=false"),
    *("model.num_layers=1", "model.hidden_dim=32", "model.num_heads=2", "model.max_seq_len=16"),
    *("train.micro_batch_size=2", "train.global_batch_size=4", "train.steps=3", "train.log_every=1"),
    *("train.eval_every=0", "train.eval_batches=1", "train.save_every=0", "train.sample_tokens=0"),
    "model.compile=blocks",
)


@pytest.mark.exhaustive
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


def test_activations_inside_of_compiled_blocks_are_refused() -> None:
    def check(activations: str, *more: str) -> None:
        config = compose([*_KEYS, f"telemetry.activations=[{activations}]", *more])
        check_patterns(config, build_model(config.model, 256, 0))

    check("blocks.*,head")
    check("blocks.*.attn", "model.compile=none")
    with pytest.raises(ConfigError, match=r"telemetry.activations: '\*.attn' matches only .* name blocks, .*blocks.0"):
        check("blocks.0,'*.attn'")
