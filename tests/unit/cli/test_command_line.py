from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain import __main__ as command
from dtrain.__main__ import main
from dtrain.config.schema import RunConfig
from dtrain.errors import ConfigError, DivergenceError

ROOT = Path(__file__).parents[3]


class Trainings:
    """Fake training: records its arguments and returns given exit codes."""

    def __init__(self) -> None:
        self.configs: list[RunConfig] = []
        self.jobs: list[int | None] = []
        self.codes: dict[int | None, int] = {}

    def __call__(self, config: RunConfig, *, job: int | None = None) -> int:
        self.configs.append(config)
        self.jobs.append(job)
        return self.codes.get(job, 0)


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> Trainings:
    recorded = Trainings()
    monkeypatch.setattr("dtrain.train.run.run_training", recorded)
    return recorded


def test_train_gets_the_resolved_config(
    trainings: Trainings, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "precision=bf16", "optim.lr=1e-3"]) == 0
    (config,) = trainings.configs
    assert (config.precision.name, config.optim.lr, config.run_dir) == ("bf16", 1e-3, None)
    assert trainings.jobs == [None]
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_exit_code_of_training_is_that_of_the_command(trainings: Trainings) -> None:
    trainings.codes[None] = 75
    assert main(["train"]) == 75


def test_usage_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"]):
        assert main(argv) == 0
        usage = capsys.readouterr().out
        assert usage.startswith("usage: dtrain VERB")
        for verb in command.VERBS:
            assert f"\n  {verb} " in usage


def test_unknown_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "dtrain: unknown verb 'trian'; did you mean 'train'?\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "dtrain 0.1.0\n"


def test_checkpoint_delegates(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr("dtrain.tools.checkpoint.cli.main", lambda argv: seen.append(argv) or 7)
    assert main(["checkpoint", "verify", "x"]) == 7
    assert seen == [["verify", "x"]]


def test_options_of_hydra_only_print(
    trainings: Trainings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()  # Hydra prints --info through it
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    assert main(["train", "seed=3", "--cfg", "job", "optim.lr=1e-3"]) == 0
    shown = capsys.readouterr().out
    assert "seed: 3\n" in shown
    assert "  lr: 0.001\n" in shown
    assert "hydra" not in shown
    assert main(["train", "--info", "searchpath"]) == 0
    assert "main" in capsys.readouterr().out
    assert trainings.configs == []


def test_cfg_reports_mistakes_in_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--cfg", "job", "engin=native"]) == 2
    assert capsys.readouterr().err == "dtrain: unknown key 'engin'; did you mean 'engine'?\n"


def test_config_dir_and_config_name_add_own_yaml(trainings: Trainings, tmp_path: Path) -> None:
    (tmp_path / "schedule").mkdir()
    (tmp_path / "schedule/slow.yaml").write_text("defaults: [wsd, _self_]\ndecay_steps: 99\n", encoding="utf-8")
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\nseed: 5\n", encoding="utf-8")
    assert main(["train", f"--config-dir={tmp_path}", "--config-name", "mine", "schedule=slow"]) == 0
    (config,) = trainings.configs
    assert (config.seed, config.schedule.name, config.schedule.decay_steps) == (5, "wsd", 99)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "words", [["--local_rank=3"], ["--local-rank=3"], ["--local_rank", "3"], ["--local-rank", "3"]]
)
def test_launcher_arguments_are_dropped(words: list[str], trainings: Trainings) -> None:
    assert main(["train", "seed=1", *words, "optim.lr=1e-3"]) == 0
    assert (trainings.configs[0].seed, trainings.configs[0].optim.lr) == (1, 1e-3)


def test_precision_from_the_environment(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DTRAIN_PRECISION", "bf16")
    assert main(["train"]) == 0
    assert main(["train", "precision=fp32"]) == 0
    assert main(["train", "-m", "precision=fp32,tf32", "run_dir=r"]) == 0
    assert main(["train", "experiment=fp16-zero2", "precision.loss_scale.growth_interval=2000"]) == 0
    assert [config.precision.name for config in trainings.configs] == ["bf16", "fp32", "fp32", "tf32", "bf16"]
    capsys.readouterr()
    monkeypatch.setenv("DTRAIN_PRECISION", "bf17")
    assert main(["train"]) == 2
    line = "dtrain: DTRAIN_PRECISION=bf17 in the environment is not a precision; did you mean 'bf16'?\n"
    assert capsys.readouterr().err == line
    monkeypatch.setenv("DTRAIN_PRECISION", "nvfp4")
    assert main(["train"]) == 2
    assert capsys.readouterr().err.startswith("dtrain: DTRAIN_PRECISION=nvfp4 in the environment: nvfp4 needs the FP4")
    monkeypatch.setenv("DTRAIN_PRECISION", "fp8")
    assert main(["train"]) == 0
    assert trainings.configs[-1].precision.name == "fp8"


@pytest.mark.parametrize(
    ("written", "rules"),
    [
        ("""precision.rules={"*.head": fp32, "blocks.0.*": bf16}""", {"*.head": "fp32", "blocks.0.*": "bf16"}),
        ("precision.rules={*.head:fp32,blocks.1:bf16}", {"*.head": "fp32", "blocks.1": "bf16"}),
        ("""precision.rules={'blocks.[01].*': fp32}""", {"blocks.[01].*": "fp32"}),
        ('precision.rules={0: fp32, "1": bf16}', {"0": "fp32", "1": "bf16"}),
        ("""precision.rules={"*.out": "bf16", "blocks.0": "fp32"}""", {"*.out": "bf16", "blocks.0": "fp32"}),
        ("""precision.rules={head: 'fp32','blocks.0' : 'bf16'}""", {"head": "fp32", "blocks.0": "bf16"}),
        ("precision.rules.head=fp32", {"head": "fp32"}),
        ("""+precision.rules={"b*": bf16, "a*": fp32}""", {"b*": "bf16", "a*": "fp32"}),
    ],
)
def test_rules_on_the_command_line(trainings: Trainings, written: str, rules: dict[str, str]) -> None:
    assert main(["train", "precision=bf16", written]) == 0
    (config,) = trainings.configs
    assert list(config.precision.rules.items()) == list(rules.items()), "in the order in which they are written"


def test_sweep(
    trainings: Trainings, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-m", "optim.lr=1e-3,2e-3", "seed=4", "model.num_layers=range(1,3)"]) == 0
    seen = [(config.optim.lr, config.model.num_layers, config.seed) for config in trainings.configs]
    assert seen == [(1e-3, 1, 4), (1e-3, 2, 4), (2e-3, 1, 4), (2e-3, 2, 4)]
    assert trainings.jobs == [1, 2, 3, 4]
    (base,) = {config.run_dir for config in trainings.configs}
    assert base is not None
    assert base.startswith("runs/")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"job 1/4: optim.lr=0.001 model.num_layers=1 -> {base}/1"
    assert lines[3] == f"job 4/4: optim.lr=0.002 model.num_layers=2 -> {base}/4"
    assert list(tmp_path.iterdir()) == []


def test_sweep_keeps_a_given_run_dir_and_stops_at_the_first_failure(trainings: Trainings) -> None:
    trainings.codes[2] = 75
    assert main(["train", "--multirun", "seed=1,2,3", "run_dir=/base"]) == 75
    assert [(config.seed, config.run_dir) for config in trainings.configs] == [(1, "/base"), (2, "/base")]


def test_sweep_from_yaml(trainings: Trainings, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\nhydra:\n  sweeper:\n    params:\n      optim.lr: 1e-3,2e-3\n"
    (tmp_path / "experiment/rates.yaml").write_text(text, encoding="utf-8")
    assert main(["train", "-m", "--config-dir", str(tmp_path), "experiment=rates", "seed=1,2"]) == 0
    assert [(c.optim.lr, c.seed) for c in trainings.configs] == [(1e-3, 1), (1e-3, 2), (2e-3, 1), (2e-3, 2)]


def test_only_rank_0_announces_jobs(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "-m", "seed=1,2"]) == 0
    assert trainings.jobs == [1, 2]
    assert capsys.readouterr() == ("", "")


def test_rank_0_prints_a_mistake_before_the_other_ranks(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed_after: list[str] = []
    monkeypatch.setattr("time.sleep", lambda seconds: printed_after.append(f"{seconds} s, {capsys.readouterr().err!r}"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "sed=1"]) == 2
    assert capsys.readouterr().err == "dtrain: unknown key 'sed'; did you mean 'seed'?\n"
    assert printed_after == []
    monkeypatch.setenv("RANK", "1")  # which a launcher has ended by then
    assert main(["train", "sed=1"]) == 2
    assert capsys.readouterr().err == "dtrain: rank 1: unknown key 'sed'; did you mean 'seed'?\n"
    assert printed_after == ["5.0 s, ''"]


def test_errors_of_training(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def diverge(config: RunConfig, *, job: int | None = None) -> int:
        raise DivergenceError("step 3: the ranks differ")

    monkeypatch.setattr("dtrain.train.run.run_training", diverge)
    assert main(["train"]) == 1
    assert capsys.readouterr().err == "dtrain: step 3: the ranks differ\n"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train"]) == 1
    assert capsys.readouterr().err == "dtrain: rank 1: step 3: the ranks differ\n"


def test_an_error_of_one_rank_names_the_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_gpu(config: RunConfig, *, job: int | None = None) -> int:
        raise ConfigError("local rank 1 has no GPU")

    monkeypatch.setattr("dtrain.train.run.run_training", no_gpu)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train"]) == 2
    assert capsys.readouterr().err == "dtrain: rank 1: local rank 1 has no GPU\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(config: RunConfig, *, job: int | None = None) -> int:
        raise ValueError("a bug")

    monkeypatch.setattr("dtrain.train.run.run_training", bug)
    with pytest.raises(ValueError, match="a bug"):
        main(["train"])


def run(command_line: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command_line, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


UNKNOWN = "dtrain: unknown key 'engin'; did you mean 'engine'?\n"


@pytest.mark.processes
@pytest.mark.parametrize("start", [["-m", "dtrain", "train"], [str(ROOT / "launch/train.py")]])
def test_processes_fail_in_one_line_and_create_nothing(start: list[str], tmp_path: Path) -> None:
    done = run([sys.executable, *start, "engin=native"], tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (2, UNKNOWN, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_torchrun_fails_in_one_line_for_all_ranks(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = run([*torchrun, str(ROOT / "launch/train.py"), "engin=native"], tmp_path)
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if line.startswith("dtrain: ")] == [UNKNOWN.strip()]
    assert "exitcode  : 2" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_launch_scripts_find_an_uninstalled_checkout(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    script = [sys.executable, str(ROOT / "launch/train.py"), "--cfg", "job", "-p", "seed"]
    done = subprocess.run(script, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "0\n")
