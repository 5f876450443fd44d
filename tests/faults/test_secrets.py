"""No secret leaves a run (P16): canaries of many kinds, searched for in every byte that it stores, sends or prints."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from dtrain.__main__ import _print_without_secrets, main
from dtrain.checkpoint.format.integrity import load_manifest
from dtrain.cli.resolve import read_jobs
from dtrain.config.dump import config_to_dict
from dtrain.config.tool_schema import AcceptConfig
from dtrain.errors import RankError
from dtrain.measure.accept import run as accept_run
from dtrain.measure.accept.job import PartJob
from dtrain.measure.accept.page import summary
from dtrain.measure.accept.table import Plan
from dtrain.measure.bench.records import FailedCase, TrainingResults
from dtrain.measure.bench.training import suites
from dtrain.measure.parity import run as parity_run
from dtrain.measure.ranks import run_ranks as run_tool_ranks
from dtrain.measure.record import head
from dtrain.measure.worker import Rank
from dtrain.tools.command import command_text
from tests.helpers import canaries
from tests.helpers.fault_counts import FEW_AND_MANY, FaultCounts
from tests.helpers.ranks import run_ranks
from tests.unit.measure.bench.made import result


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words of ``dtrain train`` with a canary in every setting that takes text."""
    for name, value in canaries.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_MODE", "offline")
    data = tmp_path / "in" / "password=c4nary-text1"
    data.mkdir(parents=True)
    (data / "a.txt").write_text("to be, or not to be " * 200)
    (tmp_path / "in" / "model").mkdir()
    args = {name: value for name, (value, _) in canaries.ARGS.items()} | canaries.READABLE
    model = {"factory": "tests.helpers.canaries:build", "num_layers": 1, "hidden_dim": 16, "num_heads": 2}
    model |= {"max_seq_len": 16, "args": args}
    (tmp_path / "in" / "model" / "canary.yaml").write_text(yaml.safe_dump(model))
    return [
        *(f"--config-dir={tmp_path}/in", "model=canary", "data=text", f"data.files={data}/*.txt".replace("=c", "\\=c")),
        *("data.validation_percent=0", "train.global_batch_size=8", "train.sample_tokens=4", "train.log_every=1"),
        *("telemetry.precision_every=1", "precision=fp32", "optim.compile=false", f"run_dir={tmp_path}/run"),
    ]


def _train(rank: int, world: int, words: list[str], printed: str) -> int:
    os.environ.update(canaries.ENVIRONMENT, WANDB_MODE="offline")
    for stream in (1, 2):
        os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), stream)
    return main(["train", *words])


@FEW_AND_MANY
@pytest.mark.processes
def test_no_file_and_no_line_of_a_run_holds_a_secret(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], many: bool, faults: FaultCounts
) -> None:
    words = [*command, "train.steps=2", "tracker=wandb", *(word.replace("d=c", "d\\=c") for word in canaries.WORDS)]
    [job] = read_jobs(words)
    planted = json.dumps(config_to_dict(job.config), ensure_ascii=False)
    assert [kind for kind, secret in canaries.secrets().items() if secret not in planted.replace("\\n", "\n")] == []
    printed, run_dir = tmp_path / "printed", tmp_path / "run"
    assert run_ranks(1, _train, words, str(printed), fresh=True) == [0], printed.read_text()
    files = {path.relative_to(run_dir).parts[0] for path in run_dir.rglob("*") if path.is_file()}
    assert {"config.yaml", "summary.json", "failures", "precision", "checkpoints", "wandb"} <= files
    leaked = canaries.leaks(run_dir, printed.read_text())
    if many:  # the same settings continue the run, whose stored ones are without secrets
        assert main(["train", *words[: len(command)], "train.steps=3", "tracker=tensorboard", words[-1]]) == 0
        leaked += canaries.leaks(run_dir, *capsys.readouterr())
        assert any((run_dir / "tensorboard").iterdir())
    assert leaked == []
    stored = yaml.safe_load((run_dir / "config.yaml").read_text())
    args = stored["model"]["args"]
    assert {name: args[name] for name in canaries.READABLE} == canaries.READABLE
    assert args["text"] == "connect with password=*** now"
    assert load_manifest(run_dir / "checkpoints" / f"step-{2 + many:08d}").state["config"] == stored
    faults.passed("P16", len(canaries.secrets()), leaked=0)


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings with secrets, for every tool."""
    for name, value in canaries.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    args = "model.args={" + ",".join(f"{name}:{name.upper()}-c4nary" for name in ("pwd", "api_key", "cookie")) + "}"
    rest = ["+model.args.url='https://x.org/?token=c4nary-url1'", "+model.args.env=${oc.env:WANDB_API_KEY}"]
    return ["model.factory=tests.helpers.canaries:build", args, *rest]


TOOL_SECRETS = ("-c4nary", "c4nary-url1", canaries.ENVIRONMENT["WANDB_API_KEY"], "c4nary-failed", "c4nary-text2")
FAILURE = f"cannot log in: pwd=c4nary-text2 password=c4nary-failed {canaries.ENVIRONMENT['WANDB_API_KEY']}"


def assert_nothing_leaked(folder: Path, printed: str) -> None:
    texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*") if path.suffix != ".png" and path.is_file()]
    assert texts
    assert [secret for secret in TOOL_SECRETS for text in [*texts, printed] if secret in text] == []


def test_parity_leaves_no_secret(words: list[str], tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    trajectory = SimpleNamespace(names=list, curve=list)
    reference = SimpleNamespace(oracle=trajectory, noise_baseline=[], noise_deviations=None, noise_failure=None)
    monkeypatch.setattr(parity_run, "ReferenceRuns", lambda *_: SimpleNamespace(skipping=lambda: reference))
    monkeypatch.setattr(parity_run, "draw", lambda *_: None)

    def fail(*_: Any, **__: Any) -> list[str]:
        raise RankError(FAILURE)

    monkeypatch.setattr(parity_run, "run_ranks", fail)
    assert main(["parity", *words, "parity.engines=[native]", "parity.device=cpu", f"run_dir={tmp_path}/p"]) == 1
    printed = capsys.readouterr()
    assert (tmp_path / "p").exists(), printed.err
    assert "model.args=***" in (tmp_path / "p" / parity_run.REPORT_FILE).read_text()
    assert_nothing_leaked(tmp_path, printed.out + printed.err)


def test_bench_leaves_no_secret(words: list[str], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def suite(config: Any, command: str) -> Iterator[TrainingResults]:
        case = result("native", 1, [[5.0]])
        rest: dict[str, Any] = {"tokens_per_rank": 1, "cases": [case], "train_starts_s": []}
        failures = [FailedCase(case.case, FAILURE)]
        yield TrainingResults(**head(command, config), suite="engine", **rest, failures=failures)

    monkeypatch.setattr(suites, "run_engine_suite", suite)
    assert main(["bench", "engine", *words, f"bench.out={tmp_path}/b.json"]) == 1
    assert_nothing_leaked(tmp_path, "".join(capsys.readouterr()))


@pytest.mark.processes
def test_accept_leaves_no_secret(tmp_path: Path, monkeypatch: Any, capsys: Any, faults: FaultCounts) -> None:
    """A job fails with secrets in its results, its log and its reason; page, results, archive and console have none."""
    monkeypatch.setenv("WANDB_API_KEY", canaries.ENVIRONMENT["WANDB_API_KEY"])
    step = {"step": "leaky", "s": 1.0, "found": FAILURE, "error": FAILURE}
    lines = ["import pathlib, sys", "from dtrain.telemetry.metrics import write_json", f"print({FAILURE!r})"]
    lines += [f"write_json(pathlib.Path(sys.argv[1]), {{'host': {{}}, 'steps': [{step!r}]}})", f"sys.exit({FAILURE!r})"]
    text = "\n".join(lines)
    (tmp_path / "leaky_package").mkdir()
    (tmp_path / "leaky_package" / "leaky.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = PartJob("leaky", "rates", "leaky_package.leaky {out} +token=PWD-c4nary", 60.0, imported="-")
    monkeypatch.setattr(accept_run, "make_plan", lambda *_, **__: Plan([], 0.0, [job]))
    command = command_text("accept", ["out=https://me:c4nary-url1@x.org", "+token=PWD-c4nary"])
    out = tmp_path / "a"
    acceptance = accept_run.accept(AcceptConfig(device="cpu"), command, out, 0.0)
    assert acceptance.ended[0].error.startswith("ended with exit code 1: ")
    print(summary(acceptance, out))
    assert_nothing_leaked(out, "".join(capsys.readouterr()))
    faults.passed("P16", len(TOOL_SECRETS))


@pytest.mark.processes
def test_logs_and_reasons_of_ranks_hold_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaky.py").write_text(f"import sys\nprint({FAILURE!r}, file=sys.stderr)\nsys.exit({FAILURE!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", canaries.ENVIRONMENT["WANDB_API_KEY"])
    with pytest.raises(RankError) as failure:
        run_tool_ranks("leaky:run", Rank(device=None), folder=tmp_path / "logs")
    assert_nothing_leaked(tmp_path / "logs", str(failure.value))


def test_a_traceback_holds_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError("password=c4nary-failed")
    except ValueError as error:
        _print_without_secrets(ValueError, error, error.__traceback__)
    assert "ValueError: password=***" in capsys.readouterr().err
