from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.cli.resolve import compose
from dtrain.config.dump import config_to_dict, to_yaml
from dtrain.engine.outcome import Culprit
from dtrain.errors import ConfigError
from dtrain.measure.replay.cli import parse
from dtrain.measure.replay.records import ReplayedStep, ReplayResult, differing_fields, on_other_ranks
from dtrain.measure.replay.report import summary_lines
from dtrain.measure.replay.run import compare
from dtrain.measure.replay.source import RecordedRun, read_run, require_named


def line(step: int, **values: Any) -> dict[str, Any]:
    numbers = {"loss": 2.5, "lr": 1e-3, "grad_norm": 1.0, "loss_scale": 1.0, "applied": True}
    return {"step": step, **numbers, **values}


def write_lines(path: Path, *lines: dict[str, Any]) -> None:
    (path / "metrics.jsonl").write_text("".join(json.dumps(item) + "\n" for item in lines))


@cache
def configuration(*overrides: str) -> str:
    return to_yaml(config_to_dict(compose(["train.steps=50", *overrides])))


def write_run(path: Path, *overrides: str, name: str = "config.yaml") -> Path:
    """Writes a run that has come to step 10."""
    path.mkdir(exist_ok=True)
    (path / name).write_text(configuration(*overrides))
    write_lines(path, *map(line, range(1, 11)), {"step": 10, "val_loss": 2.0})
    return path


def test_a_run_is_read(tmp_path: Path) -> None:
    got = parse(["runs/mine", "step=37", "ranks=2", "out=there"])
    assert (got.run, got.step, got.ranks, got.out) == (Path("runs/mine"), 37, 2, Path("there"))
    assert parse(["step=1", "runs/mine"]).ranks == 1
    write_run(tmp_path, "launch.num_processes=2", "tracker=tensorboard", "seed=5")
    (tmp_path / "precision.json").write_text(json.dumps({"precision": "bf16"}))
    source = read_run(tmp_path, 8)
    assert (source.config.seed, source.config.tracker.name, source.config.launch.num_processes) == (5, "none", None)
    assert source.config.train == compose(["train.steps=50"]).train
    assert source.config.precision.name == "bf16", "what the run chose, not what this machine would choose"
    assert (source.checkpoints, source.world_size, source.failure) == ((), None, None)
    assert sorted(source.metrics) == list(range(1, 11))
    assert read_run(tmp_path, 20).step == 20, "it may have died before it logged that step"


def test_a_failure_counts_unless_the_step_was_applied_since(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures/step-7.json").write_text(json.dumps({"world_size": 2, "evidence": None}))
    assert read_run(tmp_path, 7).failure is None
    write_lines(tmp_path, *(line(step, applied=step != 7) for step in range(1, 11)))
    assert read_run(tmp_path, 7).world_size == 2


def test_the_configuration_of_the_step_counts(tmp_path: Path) -> None:
    for seed, name in ((1, "config-until-step-4.yaml"), (2, "config-until-step-8.yaml"), (3, "config.yaml")):
        write_run(tmp_path, f"seed={seed}", name=name)
    (tmp_path / "config-until-step-8 (copy).yaml").write_text("not: ours")
    assert [read_run(tmp_path, step).config.seed for step in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]


def test_blocks_are_compiled_as_the_run_chose(tmp_path: Path) -> None:
    write_run(tmp_path, "model.compile=auto")
    assert read_run(tmp_path, 9).config.model.compile == "none"
    write_lines(tmp_path, *(line(step, compiled_graphs=1) for step in range(1, 11)))
    assert read_run(tmp_path, 9).config.model.compile == "blocks"


@pytest.mark.parametrize("override", ["model.factory=a.b:c", "optim=torch optim.factory=a.b:Mine"])
def test_code_that_only_the_run_names_is_refused(tmp_path: Path, override: str) -> None:
    run = read_run(write_run(tmp_path, *override.split()), 3)
    name = override.rpartition("=")[2]
    with pytest.raises(ConfigError, match=f"dtrain replay {tmp_path} step=3 code={name}"):
        require_named(run, ())
    with pytest.raises(ConfigError, match="code of its own"):
        require_named(run, ("other:build",))
    require_named(run, (name,))


def test_mistakes_in_files(tmp_path: Path) -> None:
    def refused(step: int = 1) -> str:
        with pytest.raises(ConfigError) as error:
            read_run(tmp_path, step)
        return str(error.value)

    assert "holds no config.yaml" in refused()
    for text in ("a: [", "parity: {ranks: 2}", "[1]", "7"):
        (tmp_path / "config.yaml").write_text(text)
        assert "config.yaml is not the configuration of a training run" in refused(), text
    write_run(tmp_path)
    assert "has come to step 10, as its metrics show; choose one up to there" in refused(21)
    write_run(tmp_path, "resume=/nowhere")
    assert "began from resume=/nowhere, where there is no checkpoint now" in refused()


LOSS = Culprit(1, 36, "forward loss", 1, num_nan=1, num_bad_losses=1)


def test_a_culprit_in_other_ranks() -> None:
    # global index 3: micro-batch 1 of rank 1 of two, micro-batch 3 of a single one, micro-batch 0 of rank 3 of four
    for rank, micro_batch, ranks in ((1, 1, 2), (0, 3, 1), (3, 0, 4)):
        found = replace(LOSS, rank=rank, micro_batch=micro_batch)
        assert on_other_ranks(found, ranks, 2) == LOSS
    assert on_other_ranks(LOSS, 1, None) == LOSS
    reduced = Culprit(3, 0, "reduced gradient", None, "w", 0, 1, 1)
    assert on_other_ranks(reduced, 4, 1) == reduced
    assert differing_fields(reduced, replace(reduced, rank=0)) == [], "the owner of a shard is no one's fault"
    assert differing_fields(reduced, replace(reduced, tensor="v")) == ["tensor"]
    assert differing_fields(LOSS, replace(LOSS, rank=0)) == ["rank"]
    assert differing_fields(None, LOSS) == ["culprit"]
    assert differing_fields(None, None) == []


def source_of(path: Path, *overrides: str) -> RecordedRun:
    return read_run(write_run(path, "engine.reproducible=true", *overrides), 2)


def replayed(step: int, **values: Any) -> ReplayedStep:
    numbers: dict[str, Any] = line(step, reason=None, **values)
    return ReplayedStep(**numbers)


def result(*steps: ReplayedStep, culprit: dict[str, Any] | None = None, records: Any = ()) -> ReplayResult:
    return ReplayResult(None, list(steps), culprit, list(records), [], "cpu")


def test_what_is_equal_and_what_differs(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    report = compare(source, result(replayed(1), replayed(2)), 1)
    assert (report.agrees, report.num_compared, report.differences) == (True, 2, [])
    equal = "losses, gradient norms and loss scales of 2 logged steps: equal bit for bit"
    assert equal in list(summary_lines(report, 1.0))
    report = compare(source, result(replayed(1, loss=2.75), replayed(2, loss=None)), 1)
    assert not report.agrees
    found = [(item.step, item.field, item.replayed) for item in report.differences]
    assert found == [(1, "loss", 2.75), (2, "loss", None)]
    text = "\n".join(summary_lines(report, 1.0))
    assert "2 losses of 2 logged steps differ; first: loss of step 1 is 2.75, logged 2.5; largest" in text
    assert "relative difference inf (loss of step 2)" in text
    report = compare(source, result(replayed(2), culprit=asdict(LOSS)), 1)
    assert (report.agrees, report.differing_fields) == (False, ["culprit"]), "a skip that the run did not have"
    assert "culprit differs from the recorded one in culprit; recorded: none" in "\n".join(summary_lines(report, 1.0))


@pytest.mark.parametrize(
    ("reproducible", "device", "version", "note"),
    [
        ("true", "NVIDIA H100", None, "the run used device NVIDIA H100, this is cpu: kernels may round"),
        ("true", "cpu", "2.0.0", "the run used PyTorch 2.0.0, this is 2."),
        ("true", "cpu", torch.__version__, ""),
        ("true", None, None, ""),
        ("false", None, None, "the run is not reproducible (engine.reproducible=false), so bits may differ"),
    ],
)
def test_bits_are_promised_on_the_same_device_and_version_alone(
    tmp_path: Path, reproducible: str, device: str | None, version: str | None, note: str
) -> None:
    versions = {} if version is None else {"torch": str(version)}
    source = replace(source_of(tmp_path, f"engine.reproducible={reproducible}"), device=device, versions=versions)
    report = compare(source, result(replayed(1, loss=2.75)), 1)
    assert (report.promises_bits, report.agrees) == (not note, bool(note))
    assert any(bool(note) and own.startswith(note) for own in report.notes) == bool(note)
