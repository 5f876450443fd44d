"""``dtrain replay`` without a training: its command line, the files of a run, and the comparison."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.__main__ import main
from dtrain.cli.resolve import compose
from dtrain.config.dump import config_to_dict, to_yaml
from dtrain.config.schema import RunConfig
from dtrain.engine.outcome import Culprit
from dtrain.errors import ConfigError
from dtrain.tools.replay.cli import parse
from dtrain.tools.replay.records import (
    MicroBatchRecord,
    ReplayedStep,
    ReplayResult,
    differing_fields,
    on_other_ranks,
)
from dtrain.tools.replay.report import micro_batch_table, summary_lines
from dtrain.tools.replay.run import compare
from dtrain.tools.replay.source import RecordedRun, read_run, require_named
from dtrain.tools.replay.worker import run_job  # noqa: F401 - imports what a rank needs

# -- the command line --------------------------------------------------------------------------------------------------


def test_arguments() -> None:
    got = parse(["runs/mine", "step=37", "ranks=2", "out=there"])
    assert (got.run, got.step, got.ranks, got.out) == (Path("runs/mine"), 37, 2, Path("there"))
    assert parse(["step=1", "runs/mine"]).ranks == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["step=3"], "dtrain replay takes one run directory, got 0"),
        (["a", "b", "step=3"], "dtrain replay takes one run directory, got 2"),
        (["runs/mine"], "needs the step to reproduce: dtrain replay runs/mine step=37"),
        (["runs/mine", "step=0"], "step=0 must be a whole number of 1 or more"),
        (["runs/mine", "step=x"], "step=x must be a whole number"),
        (["runs/mine", "step=3", "ranks=-1"], "ranks=-1 must be a whole number"),
        (["runs/mine", "step=3", "rank=2"], "got 'rank'; did you mean 'ranks'?"),
        (["runs/mine", "step=3", "precision=bf16"], "All other settings are the run's own"),
        (["runs/mine", "step=3", "out="], "out is empty"),
    ],
)
def test_mistakes_in_arguments(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(argv)
    assert message in str(error.value)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"]):
        assert main(["replay", *argv]) == 0
        assert capsys.readouterr().out.startswith("usage: dtrain replay RUN step=N [ranks=K] [out=FOLDER]")


# -- the files of a run ------------------------------------------------------------------------------------------------


def line(step: int, **values: Any) -> dict[str, Any]:
    numbers = {"loss": 2.5, "lr": 1e-3, "grad_norm": 1.0, "loss_scale": 1.0, "applied": True}
    return {"step": step, **numbers, **values}


def write_run(path: Path, *overrides: str, last: int = 10, **values: Any) -> RunConfig:
    config = replace(compose(["train.steps=50", *overrides]), **values)
    path.mkdir(exist_ok=True)
    (path / "config.yaml").write_text(to_yaml(config_to_dict(config)))
    lines = [line(step) for step in range(1, last + 1)] + [{"step": last, "val_loss": 2.0}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(item) + "\n" for item in lines))
    return config


def test_a_run_is_read(tmp_path: Path) -> None:
    config = write_run(tmp_path / "run", "launch.num_processes=2", "tracker=tensorboard", "seed=5")
    (tmp_path / "run/failures").mkdir()
    evidence = {"rank": 1, "step": 6, "phase": "forward loss", "micro_batch": 0, "num_nan": 1, "num_bad_losses": 1}
    (tmp_path / "run/failures/step-7.json").write_text(json.dumps({"world_size": 2, "evidence": evidence}))
    (tmp_path / "run/precision.json").write_text(json.dumps({"precision": "bf16"}))
    source = read_run(tmp_path / "run", 8)
    assert (source.config.seed, source.config.tracker.name, source.config.launch.num_processes) == (5, "none", None)
    assert source.config.train == config.train
    assert source.config.precision.name == "bf16", "what the run chose, not what this machine would choose"
    assert (source.checkpoints, source.world_size, source.failure) == ((), None, None)
    assert sorted(source.metrics) == list(range(1, 11))


def test_a_failure_counts_unless_the_step_was_applied_since(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures/step-7.json").write_text(json.dumps({"world_size": 2, "evidence": None}))
    assert read_run(tmp_path, 7).failure is None
    lines = [line(step, applied=step != 7) for step in range(1, 11)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(item) + "\n" for item in lines))
    assert read_run(tmp_path, 7).world_size == 2


def test_the_configuration_of_the_step_counts(tmp_path: Path) -> None:
    write_run(tmp_path, "seed=1")
    (tmp_path / "config.yaml").rename(tmp_path / "config-until-step-4.yaml")
    write_run(tmp_path, "seed=2")
    (tmp_path / "config.yaml").rename(tmp_path / "config-until-step-8.yaml")
    write_run(tmp_path, "seed=3")
    (tmp_path / "config-until-step-8 (copy).yaml").write_text("not: ours")
    assert [read_run(tmp_path, step).config.seed for step in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]


def test_blocks_are_compiled_as_the_run_chose(tmp_path: Path) -> None:
    write_run(tmp_path, "model.compile=auto")
    assert read_run(tmp_path, 9).config.model.compile == "none"
    lines = [line(step, compiled_graphs=1) for step in range(1, 11)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(item) + "\n" for item in lines))
    assert read_run(tmp_path, 9).config.model.compile == "blocks"


def test_a_blanked_value_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_run(tmp_path, "model.factory=a.b:c", "model.args={token: '***'}")
    read_run(tmp_path, 1)
    assert "model.args.token is blanked in" in caplog.text


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("model.factory=a.b:c", "a.b:c"),
        ("optim.factory=a.b:Mine", "a.b:Mine"),
        ("model.factory=torch.hub:load", "torch.hub:load"),
    ],
)
def test_code_that_only_the_run_names_is_refused(tmp_path: Path, override: str, name: str) -> None:
    write_run(tmp_path, *(["optim=torch"] if override.startswith("optim") else []), override)
    run = read_run(tmp_path, 3)
    with pytest.raises(ConfigError) as error:
        require_named(run, ())
    assert f"dtrain replay {tmp_path} step=3 code={name}" in str(error.value)
    with pytest.raises(ConfigError, match="code of its own"):
        require_named(run, ("other:build",))
    require_named(run, (name,))


@pytest.mark.parametrize("data", ["data=friedman model=mlp", "data=glyphs model=convnet", "data=glyphs model=vit"])
def test_models_of_dtrain_need_no_name(tmp_path: Path, data: str) -> None:
    write_run(tmp_path, *data.split())
    require_named(read_run(tmp_path, 3), ())


def test_code_that_the_run_does_not_use_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "optim=torch")
    run = read_run(tmp_path, 3)
    require_named(run, ())
    with pytest.raises(ConfigError, match="uses no code but dtrain and torch; leave code= out"):
        require_named(run, ("a.b:c",))


def test_mistakes_in_files(tmp_path: Path) -> None:
    def refused(path: Path, step: int = 1) -> str:
        with pytest.raises(ConfigError) as error:
            read_run(path, step)
        return str(error.value)

    assert "no such directory; give the run directory" in refused(tmp_path / "none")
    assert "holds no config.yaml" in refused(tmp_path)
    for text in ("a: [", "parity: {ranks: 2}", "[1]", "7"):
        (tmp_path / "config.yaml").write_text(text)
        assert "config.yaml is not the configuration of a training run" in refused(tmp_path), text
    write_run(tmp_path, last=10)
    assert "has come to step 10, as its metrics show; choose one up to there" in refused(tmp_path, 21)
    assert read_run(tmp_path, 20).step == 20, "it may have died before it logged that step"
    write_run(tmp_path, "resume=/nowhere")
    assert "began from resume=/nowhere, where there is no checkpoint now" in refused(tmp_path)


# -- mistakes that the ranks find --------------------------------------------------------------------------------------


def test_mistakes_of_a_replay_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text " * 100)
    tiny = ("data=text", "data.files=text.txt", "model.max_seq_len=16", "model.hidden_dim=16", "model.num_layers=1")

    def refused(*words: str) -> str:
        assert main(["replay", "run", "step=1", *words]) == 2
        return capsys.readouterr().err

    write_run(tmp_path / "run", *tiny, "model.num_heads=2")
    assert "train.global_batch_size=16 does not divide by train.micro_batch_size=8 x 3 ranks" in refused("ranks=3")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    assert "is not empty; choose a new folder" in refused("out=full")
    name = "nowhere.to_be_found:build"
    write_run(tmp_path / "run", *tiny, f"model.factory={name}")
    assert f"model.factory={name}: no module named nowhere" in refused(f"code={name}")
    write_run(tmp_path / "run", "data=text", "data.files=gone.txt")
    assert "data.files=gone.txt matches no file" in refused()


# -- the comparison ----------------------------------------------------------------------------------------------------

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


def source_of(tmp_path: Path, *overrides: str) -> RecordedRun:
    write_run(tmp_path, "engine.reproducible=true", *overrides)
    return read_run(tmp_path, 2)


def replayed(step: int, **values: Any) -> ReplayedStep:
    numbers: dict[str, Any] = line(step, reason=None, **values)
    return ReplayedStep(**numbers)


def test_what_is_equal_and_what_differs(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    same = ReplayResult(None, [replayed(1), replayed(2)], None, [], [], "cpu")
    report = compare(source, same, 1)
    assert (report.agrees, report.num_compared, report.differences) == (True, 2, [])
    assert "losses, gradient norms and loss scales of 2 logged steps: equal bit for bit" in list(
        summary_lines(report, 1.0)
    )
    other = ReplayResult(None, [replayed(1, loss=2.75), replayed(2, loss=None)], None, [], [], "cpu")
    report = compare(source, other, 1)
    assert not report.agrees
    assert [(item.step, item.field, item.replayed) for item in report.differences] == [
        (1, "loss", 2.75),
        (2, "loss", None),
    ]
    text = "\n".join(summary_lines(report, 1.0))
    assert "2 losses of 2 logged steps differ; first: loss of step 1 is 2.75, logged 2.5; largest" in text
    assert "relative difference inf (loss of step 2)" in text


def test_a_table_of_many_samples_stays_narrow(tmp_path: Path) -> None:
    record = MicroBatchRecord(0, list(range(32)), 1.5, 1.0, [str(number) for number in range(32)], "")
    result = ReplayResult(None, [replayed(1)], None, [record, replace(record, index=1, text=[])], [], "cpu")
    (_, _, samples, _, _, text), (*_, no_text) = micro_batch_table(compare(source_of(tmp_path), result, 1)).rows
    assert samples == "0 1 2 3 4 5 6 7 and 24 more"
    assert text == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9,..."
    assert no_text == ""


def test_a_run_that_promises_no_bits_may_differ(tmp_path: Path) -> None:
    source = source_of(tmp_path, "engine.reproducible=false")
    report = compare(source, ReplayResult(None, [replayed(1, loss=2.75)], None, [], [], "cpu"), 1)
    assert report.agrees
    assert "so bits may differ" in report.notes[0]


@pytest.mark.parametrize(
    ("device", "version", "note"),
    [
        ("NVIDIA H100 80GB HBM3", None, "the run used device NVIDIA H100 80GB HBM3, this is cpu: kernels may round"),
        ("cpu", "2.0.0", "the run used PyTorch 2.0.0, this is 2."),
        ("cpu", torch.__version__, None),
        (None, None, None),
    ],
)
def test_bits_are_promised_on_the_same_device_and_version_alone(
    tmp_path: Path, device: str | None, version: str | None, note: str | None
) -> None:
    versions = {} if version is None else {"torch": str(version)}
    source = replace(source_of(tmp_path), device=device, versions=versions)
    report = compare(source, ReplayResult(None, [replayed(1, loss=2.75)], None, [], [], "cpu"), 1)
    assert (report.promises_bits, report.agrees) == (note is None, note is not None)
    assert any(note is not None and own.startswith(note) for own in report.notes) == (note is not None)


def test_a_skip_that_the_run_did_not_have_differs(tmp_path: Path) -> None:
    from dataclasses import asdict

    result = ReplayResult(None, [replayed(2)], asdict(LOSS), [], [], "cpu")
    report = compare(source_of(tmp_path), result, 1)
    assert (report.agrees, report.differing_fields) == (False, ["culprit"])
    assert "culprit differs from the recorded one in culprit; recorded: none" in "\n".join(summary_lines(report, 1.0))
