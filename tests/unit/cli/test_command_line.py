from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from dtrain import __main__ as command
from dtrain.__main__ import main
from dtrain.cli.resolve import Job
from dtrain.config.schema import RunConfig
from dtrain.errors import ConfigError, DivergenceError

ROOT = Path(__file__).parents[3]
Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands in for ``run_training``; it ends with exit code 0."""
    recorded = Mock(return_value=0)
    monkeypatch.setattr("dtrain.train.run.run_training", recorded)
    return recorded


def trained(training: Mock) -> list[RunConfig]:
    return [call.args[0] for call in training.call_args_list]


def jobs(training: Mock) -> list[int | None]:
    return [call.kwargs["job"] for call in training.call_args_list]


def test_train_gets_the_resolved_config_without_arguments_of_launchers(
    training: Mock, capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training.return_value = 75
    ranks = ["--local_rank=3", "--local-rank=3", "--local_rank", "3", "--local-rank", "3"]
    assert main(["train", "precision=bf16", *ranks, "optim.lr=1e-3"]) == 75
    (config,) = trained(training)
    assert (config.precision.name, config.optim.lr, config.run_dir) == ("bf16", 1e-3, None)
    assert jobs(training) == [None]
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_usage_version_and_verbs(monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    for argv in ([], ["--help"]):
        assert main(argv) == 0
        usage = capsys.readouterr().out
        assert usage.startswith("usage: dtrain VERB")
        assert not [verb for verb in command.VERBS if f"\n  {verb} " not in usage]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "dtrain 0.1.0\n"
    monkeypatch.setattr("dtrain.tools.checkpoint.cli.main", lambda argv: 7 if argv == ["verify", "x"] else 0)
    assert main(["checkpoint", "verify", "x"]) == 7


def test_options_of_hydra_only_print(training: Mock, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()  # Hydra prints --info through it
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    assert main(["train", "seed=3", "--cfg", "job", "optim.lr=1e-3"]) == 0
    shown = capsys.readouterr().out
    assert ("seed: 3\n" in shown, "  lr: 0.001\n" in shown, "hydra" in shown) == (True, True, False)
    assert main(["train", "--info", "searchpath"]) == 0
    assert "main" in capsys.readouterr().out
    training.assert_not_called()


def test_config_dir_and_config_name_add_own_yaml(training: Mock, tmp_path: Path) -> None:
    (tmp_path / "schedule").mkdir()
    (tmp_path / "schedule/slow.yaml").write_text("defaults: [wsd, _self_]\ndecay_steps: 99\n", encoding="utf-8")
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\nseed: 5\n", encoding="utf-8")
    assert main(["train", f"--config-dir={tmp_path}", "--config-name", "mine", "schedule=slow"]) == 0
    (config,) = trained(training)
    assert (config.seed, config.schedule.name, config.schedule.decay_steps) == (5, "wsd", 99)  # type: ignore[attr-defined]


def test_precision_from_the_environment(training: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_PRECISION", "bf16")
    assert main(["train", "experiment=fp16-zero2", "precision.loss_scale.growth_interval=2000"]) == 0
    assert main(["train", "-m", "precision=fp32", "run_dir=r"]) == 0
    assert [config.precision.name for config in trained(training)] == ["bf16", "fp32"]


MANY = """precision.rules={"*.head": fp32, 'blocks.[01].*' : 'bf16','a b': "fp32",blocks.1:bf16, 0: fp32, "1": bf16}"""


@pytest.mark.parametrize(
    ("written", "rules"),
    [
        (MANY, "*.head=fp32 blocks.[01].*=bf16 a b=fp32 blocks.1=bf16 0=fp32 1=bf16"),
        ("""+precision.rules={"b*": bf16, "a*": fp32}""", "b*=bf16 a*=fp32"),
        ("precision.rules.head=fp32", "head=fp32"),
    ],
)
def test_rules_are_read_in_the_order_in_which_they_are_written(training: Mock, written: str, rules: str) -> None:
    assert main(["train", "precision=bf16", written]) == 0
    (config,) = trained(training)
    assert " ".join(f"{pattern}={name}" for pattern, name in config.precision.rules.items()) == rules


def test_sweep_from_the_command_line_and_yaml_ends_with_the_first_failure(
    training: Mock, capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\nhydra:\n  sweeper:\n    params:\n      optim.lr: 1e-3,2e-3\n"
    (tmp_path / "experiment/rates.yaml").write_text(text, encoding="utf-8")
    training.side_effect = [0, 0, 75]
    words = ["-m", "--config-dir", str(tmp_path), "experiment=rates", "seed=4", "model.num_layers=range(1,3)"]
    assert main(["train", *words]) == 75
    seen = [(config.optim.lr, config.model.num_layers, config.seed) for config in trained(training)]
    assert seen == [(1e-3, 1, 4), (1e-3, 2, 4), (2e-3, 1, 4)]
    assert jobs(training) == [1, 2, 3]
    (base,) = {config.run_dir for config in trained(training)}
    assert str(base).startswith("runs/")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"job 1/4: optim.lr=0.001 model.num_layers=1 -> {base}/1"
    assert lines[2:] == [f"job 3/4: optim.lr=0.002 model.num_layers=1 -> {base}/3"]
    assert [path.name for path in tmp_path.iterdir()] == ["experiment"]


def test_a_sweep_is_silent_on_rank_1(training: Mock, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--multirun", "seed=1,2", "run_dir=/base"]) == 0
    assert [(config.seed, config.run_dir) for config in trained(training)] == [(1, "/base"), (2, "/base")]
    assert jobs(training) == [1, 2]
    assert capsys.readouterr() == ("", "")


def test_rank_0_prints_a_mistake_before_the_other_ranks(monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    printed_after: list[str] = []
    monkeypatch.setattr("time.sleep", lambda seconds: printed_after.append(f"{seconds} s, {capsys.readouterr().err!r}"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "--multirn"]) == 2
    assert capsys.readouterr().err == "dtrain: unknown option '--multirn'; did you mean '--multirun'?\n"
    assert printed_after == []
    monkeypatch.setenv("RANK", "1")  # which a launcher has ended by then
    assert main(["train", "--multirn"]) == 2
    assert capsys.readouterr().err == "dtrain: rank 1: unknown option '--multirn'; did you mean '--multirun'?\n"
    assert printed_after == ["5.0 s, ''"]


@pytest.mark.parametrize(("world", "prefix"), [(1, "dtrain: "), (2, "dtrain: rank 1: ")])
def test_errors_of_training_are_one_line_and_a_bug_keeps_its_traceback(
    world: int, prefix: str, training: Mock, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setattr("dtrain.cli.resolve.read_jobs", lambda argv: [Job(RunConfig())])
    if world > 1:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", str(world))
    training.side_effect = [DivergenceError("step 3: the ranks differ"), ConfigError("no GPU"), ValueError("a bug")]
    assert main(["train"]) == 1
    assert capsys.readouterr().err == f"{prefix}step 3: the ranks differ\n"
    assert main(["train"]) == 2
    assert capsys.readouterr().err == f"{prefix}no GPU\n"
    with pytest.raises(ValueError, match="a bug"):
        main(["train"])


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command_line = [sys.executable, *arguments]
    return subprocess.run(command_line, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


UNKNOWN = "dtrain: unknown key 'engin'; did you mean 'engine'?"


@pytest.mark.processes
def test_the_launch_script_fails_in_one_line_and_creates_nothing(tmp_path: Path) -> None:
    done = run(str(ROOT / "launch/train.py"), "engin=native", folder=tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (2, f"{UNKNOWN}\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_an_installed_package_reads_its_own_conf(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "dtrain", tmp_path / "dtrain", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "conf", tmp_path / "dtrain/conf")
    with (tmp_path / "dtrain/conf/train.yaml").open("a", encoding="utf-8") as file:
        file.write("seed: 41\n")
    done = run("-m", "dtrain", "train", "--cfg", "job", "-p", "seed", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "41\n")
