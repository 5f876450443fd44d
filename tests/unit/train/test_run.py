"""Whole runs with the real engine: files, exit codes, resume, preemption, world sizes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from dtrain.__main__ import main
from dtrain.cli.resolve import compose
from dtrain.distributed.progress import Phase, ProgressRecord
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.engine.outcome import Culprit
from dtrain.errors import CheckpointError, ConfigError, DtrainError
from dtrain.planning.plans import RunPlanner
from dtrain.precision.forward import REDUCED_SUMS
from dtrain.precision.report import Float8ProductPrecision, OperandPrecision, PrecisionReport
from dtrain.supervision.hang import Hang, PhaseLimits, RankState
from dtrain.supervision.watcher import HANG_FILE, HangReport
from dtrain.tasks import language
from dtrain.tasks.classification import Classification
from dtrain.tasks.regression import Regression
from dtrain.telemetry.metrics import FAILURES, RESTARTS_FILE, TIMES, StepMetrics, read_metrics
from dtrain.telemetry.precision import PrecisionFindings
from dtrain.telemetry.trackers import TRACKER_FILE
from dtrain.train import run
from dtrain.train.receipt import Receipt
from dtrain.train.restarts import Attempts
from dtrain.train.run import run_training
from dtrain.train.run_dir import RunDir
from dtrain.train.setup import make_engine
from tests.engines.helpers import fingerprints
from tests.helpers.checkpoints import ALONE
from tests.helpers.launch import summary
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

_REFERENCE = Path(__file__).parents[3] / "docs/reference"
_SMALL = [
    *("experiment=smoke", "precision=fp32", "model.hidden_dim=16", "engine.reproducible=true"),
    "schedule=constant",  # the rate does not depend on train.steps
    *("train.sample_tokens=0", "train.steps=4", "train.eval_every=2", "train.save_every=2"),
    *("train.global_batch_size=4", "train.eval_batches=3", "launch.threads_per_rank=1", "telemetry.precision_every=3"),
]


def _run(rank: int, world: int, run_dir: str, *overrides: str) -> int:
    return run_training(compose([*_SMALL, f"run_dir={run_dir}", *overrides]), planner=RunPlanner())


def _curve(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics without those that depend on the clock, and without sampled steps."""
    lines = [line for line in read_metrics(run_dir / "metrics.jsonl") if "precision" not in line]
    return [{key: line[key] for key in line if key not in TIMES} for line in lines]


def _sample(run_dir: Path) -> dict[str, Any]:
    """The parameters of the sampled step, without norms, whose last bits depend on the sharding."""
    parameters = json.loads((run_dir / "precision" / "step-3.json").read_text())["parameters"]
    return {name: {**own, "update": {**own["update"], "ratio": None}} for name, own in parameters.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps on one rank."""
    run_dir = tmp_path_factory.mktemp("whole")
    assert run_ranks(1, _run, str(run_dir)) == [0]
    return run_dir


def test_files_of_a_run(whole: Path) -> None:
    names = "checkpoints config.yaml environment.json memory.json metrics.jsonl precision precision.json report.html"
    assert {path.name for path in whole.iterdir()} == {*names.split(), "summary.json"}
    assert [path.name for path in (whole / "precision").iterdir()] == ["step-3.json"]
    (sampled,) = [line for line in read_metrics(whole / "metrics.jsonl") if "precision" in line]
    assert sampled["step"] == 3
    assert len(sampled["precision"]["worst"]) == 10
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    curve = _curve(whole)
    assert [line["step"] for line in curve] == [1, 2, 2, 3, 4, 4]
    assert [line["step"] for line in curve if "val_loss" in line] == [2, 4]
    found = summary(whole)
    assert json.loads((whole / "precision.json").read_text()) == found["contract"]
    assert (found["finished"], found["steps"], found["skipped_steps"]) == (True, 4, 0)
    assert found["tokens"] == curve[-2]["tokens"] == 4 * 4 * 64
    assert found["val_loss"] == curve[-1]["val_loss"]
    assert found["train_loss"] == curve[-2]["loss"]
    assert found["memory"]["master"] >= found["memory_formula"]["master"] > 0


def _documented(page: str, before: str) -> dict[str, list[str]]:
    """Returns the other cells by the name in the first, of the first table after the line ``before``."""
    text = (_REFERENCE / page).read_text(encoding="utf-8").split(f"\n{before}\n")[1]
    rows = text.partition("\n| --- ")[2].partition("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    return {name.strip("`"): others for name, *others in cells}


def test_the_reference_names_the_fields_of_a_run(whole: Path) -> None:
    """Each that a run writes, and no other."""
    lines = read_metrics(whole / "metrics.jsonl")
    steps = _documented("metrics.md", "## A training step")
    assert [*steps] == [item.name for item in fields(StepMetrics) if item.name != "evidence"]
    here = {name for name, (_, written, _) in steps.items() if written in ("always", "for tokens", "on a CPU")}
    assert [line.keys() for line in lines if "loss" in line] == [here] * 4
    assert [line.keys() for line in lines if "val_loss" in line] == [{"step", "val_loss"}] * 2
    (sampled,) = [line["precision"] for line in lines if "precision" in line]
    assert [*_documented("metrics.md", "## A sampled step")] == [*sampled]
    assert [*_documented("metrics.md", "Each entry of `worst`:")] == [*sampled["worst"][0]]
    assert _documented("metrics.md", "## summary.json").keys() == summary(whole).keys()


def test_the_reference_names_the_fields_of_other_runs() -> None:
    """Metrics of the tasks, and those of FP8."""
    found = Classification(("cat", "dog"), (2,)).metrics([1.0], 2.0)
    found = {**found, **Regression((1,), (0.0,), (1.0,)).metrics([1.0, 0.0, 4.0], 2.0)}
    names = ["val_loss", "val_loss_ema", *(f"val_{name}" for name in found)]
    assert [*_documented("metrics.md", "## A validation")] == names
    operands = [OperandPrecision(name, "e4m3", 20.0, 0.0, 0.0) for name in ("input", "weight", "gradient")]
    products = (Float8ProductPrecision.of("head", "fprop", tuple(operands)),)
    (entry,) = PrecisionFindings(PrecisionReport(3, True, 1.0, None, (), products)).summary()["worst_float8"]
    assert [*_documented("metrics.md", "Each entry of `worst_float8`:")] == [*entry]


def test_the_reference_names_the_files_of_a_run(whole: Path) -> None:
    """Each that a run writes, and no other."""
    written = {re.sub(r"\d+", "N", str(path.relative_to(whole))) for path in whole.rglob("*") if path.is_file()}
    other_runs = {
        *(
            "config-until-step-N.yaml",
            "precision-until-step-N.json",
            "deepspeed.json",
            "tokenizer/",
            TRACKER_FILE,
            "wandb/",
            "tensorboard/",
        ),
        *(RESTARTS_FILE, "checkpoints/lease-N.json", "sample.txt", "sample.png"),
        *(f"{FAILURES}/{name}" for name in ("step-N.json", f"hang-N/{HANG_FILE}", "hang-N/rank-N.txt")),
    }
    assert not written & other_runs
    assert {*_documented("run-directory.md", "## Which file holds what")} == written | other_runs


def test_the_reference_names_the_fields_of_failures(tmp_path: Path) -> None:
    rank = RankState(0, 7, ProgressRecord(2, Phase.BACKWARD, 0, 3, 2, "all_gather", num_steps=1), 4.0)
    HangReport(Hang((0,), "rank 0 is late"), [rank], {0: b"stack"}, PhaseLimits(3, 3, 3)).write(tmp_path)
    hang = json.loads((tmp_path / "hang-1" / HANG_FILE).read_text())
    titles: dict[str, Collection[str]] = {
        "Fields of `evidence`:": [item.name for item in fields(Culprit)],
        "## Fields of failures/hang-N/hang.json": hang,
        "Fields of an object in `ranks`:": hang["ranks"][0],
        "## Fields of restarts.json": [item.name for item in fields(Attempts)],
        "## Fields of memory.json": [item.name for item in fields(Receipt)],
    }
    for title, names in titles.items():
        assert [*_documented("run-directory.md", title)] == [*names], title
    assert {path.name for path in (tmp_path / "hang-1").iterdir()} == {HANG_FILE, "rank-0.txt"}
    phases = _documented("run-directory.md", "Fields of an object in `ranks`:")["phase"][0]
    assert re.findall(r"`(\w+)`", phases) == [phase.name.lower() for phase in Phase]


def test_a_finished_run_does_nothing_and_can_be_extended(whole: Path, tmp_path: Path) -> None:
    """Its tokens are counted with the batch size of their step."""
    before = (whole / "metrics.jsonl").read_bytes()
    assert run_ranks(1, _run, str(whole)) == [0]
    assert (whole / "metrics.jsonl").read_bytes() == before
    more = (f"resume={whole}", "train.steps=5", "train.global_batch_size=8", "report=false")
    assert run_ranks(1, _run, str(tmp_path), *more) == [0]
    assert [(line["step"], line.get("tokens")) for line in _curve(tmp_path)] == [(5, 24 * 64), (5, None)]
    assert summary(tmp_path)["tokens"] == 24 * 64


def test_two_ranks_and_one_that_resumes_have_the_bits_and_files_of_one(whole: Path, tmp_path: Path) -> None:
    for world, steps in ((2, 3), (1, 4)):
        words = (f"train.steps={steps}", f"train.save_every={2 * (world - 1)}")
        assert run_ranks(world, _run, str(tmp_path), *words) == [0] * world
    assert fingerprints(tmp_path) == fingerprints(whole)
    assert [line for line in _curve(tmp_path) if (line["step"], "val_loss" in line) != (3, True)] == _curve(whole)
    assert _sample(tmp_path) == _sample(whole)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in whole.iterdir()} | {"config-until-step-3.yaml"}


def test_the_moving_average_is_validated_and_a_static_loss_scale_has_no_bounds(tmp_path: Path) -> None:
    words = ["ema.decay=0.5", "optim=lion", "optim.lr=1e-3", "precision.loss_scale.mode=static", "report=false"]
    assert run_ranks(1, _run, str(tmp_path), *words, f"precision.loss_scale.init={2.0**26}") == [0]
    curve = _curve(tmp_path)
    assert curve[0]["loss_scale"] == 2.0**26
    validations = [line for line in curve if "val_loss" in line]
    assert [line["step"] for line in validations] == [2, 4]
    assert all(line["val_loss_ema"] > line["val_loss"] for line in validations)  # it lags behind a falling loss
    assert summary(tmp_path)["val_loss_ema"] == validations[-1]["val_loss_ema"]


def _refused(rank: int, world: int, run_dir: str, *cases: tuple[str, ...]) -> list[tuple[str, str]]:
    """Returns the error of each case of overrides; RANK is the rank, and SLURM... a variable."""
    found = []
    for words in cases:
        os.environ.update(word.split("=") for word in words if word.startswith("SLURM"))
        own = [word.replace("RANK", str(rank)) for word in words if not word.startswith("SLURM")]
        try:
            _run(rank, world, run_dir, *own)
            found.append(("", ""))
        except DtrainError as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_ranks_that_were_started_differently_are_refused(tmp_path: Path) -> None:
    found = run_ranks(2, _refused, str(tmp_path / "run"), ("optim.lr=1RANK",))
    text = "different configs: optim: 'lr' is 10.0 on rank 0 and 11.0 on rank 1; start every rank with the same"
    assert found == [[("ConfigError", f"the ranks were started with {text} configuration")]] * 2
    assert not (tmp_path / "run").exists()


def test_a_run_whose_checkpoints_are_all_damaged_never_restarts(whole: Path, tmp_path: Path) -> None:
    """Nor at the second launch, which finds what the first has set aside."""
    shutil.copytree(whole, tmp_path / "run")
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("step-*"):
        (checkpoint / "r0000.safetensors").write_bytes(b"")
    more = ("train.steps=5",)
    for name, message in run_ranks(1, _refused, str(tmp_path / "run"), more, more)[0]:
        assert name == "CheckpointError"
        assert "no checkpoint in" in message
        assert "step-00000004" in message
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


REFUSALS = {
    "precision=tf32": "precision=tf32 needs an NVIDIA GPU",
    "engine.zero_stage=3 engine.keep_gathered=[hed]": "keep_gathered pattern 'hed' matches no parameter and no module",
    "precision.rules={hed:fp32}": "precision rule 'hed' matches no module; did you mean 'head'?",
    "telemetry.activations=[blocks.*,hed]": (
        "telemetry.activations: 'hed' matches no module of the model; did you mean 'head'?"
    ),
    "telemetry.advice=none.json": "none.json: no such file; expected the JSON that `dtrain probe` writes",
    "telemetry.advice=pyproject.toml": "pyproject.toml: expected the JSON that `dtrain probe` writes",
    "SLURM_NTASKS=2": "SLURM_NTASKS=2, but this process is not one of several tasks",  # sets a variable: the last one
}


def test_refusals_of_model_and_device_leave_no_folder(tmp_path: Path) -> None:
    cases = [("launch.device=cpu", *words.split()) for words in REFUSALS]
    (found,) = run_ranks(1, _refused, str(tmp_path / "run"), *cases)
    for (name, text), (words, message) in zip(found, REFUSALS.items(), strict=True):
        assert name == "ConfigError", words
        assert message in text
    assert not (tmp_path / "run").exists()


def test_an_optimizer_that_does_not_exist_is_named_by_its_key() -> None:
    config = compose(["optim=torch", "optim.factory=torch.optim:RAdamm", "precision=fp32"])
    with pytest.raises(ConfigError, match=r"^optim\.factory=torch\.optim:RAdamm: .*; did you mean 'RAdam'"):
        make_engine(config, torch.nn.Linear(2, 2), SingleRank(torch.device("cpu")))


def _torch_settings() -> list[Any]:
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
        [getattr(torch.backends.cuda.matmul, name) for name in REDUCED_SUMS],
    ]


def _around_a_broken_sample(rank: int, world: int, run_dir: str) -> tuple[list[Any], list[list[Any]]]:
    """Returns how often the sample may compile and its phase, and settings of torch: before, after a run, a refusal."""
    handler = SimpleNamespace(start_callbacks=[], end_callbacks=[])
    sys.modules["torch._dynamo.callback"] = SimpleNamespace(callback_handler=handler)  # type: ignore[assignment]
    seen: list[Any] = []
    log_summary = run._log_summary

    def broken(engine: Any, *args: Any) -> Any:
        seen.extend((len(handler.start_callbacks), engine.comm.schedule.progress))
        raise ValueError("no text from me")

    def log_and_see(*args: Any) -> None:
        seen[1] = seen[1].phase.name
        log_summary(*args)

    language.generate, run._log_summary = broken, log_and_see  # type: ignore[assignment]
    os.dup2(os.open(f"{run_dir}.log", os.O_WRONLY | os.O_CREAT), 2)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    found = [_torch_settings()]
    words = ("train.steps=2", "train.sample_tokens=8", "optim.compile=false", "report=false")
    assert _run(rank, world, run_dir, *words) == 0
    found.append(_torch_settings())
    assert _refused(rank, world, run_dir, ("train.steps=4", "model.hidden_dim=32"))[0][0] == "ConfigError"
    return [*seen, len(handler.start_callbacks)], [*found, _torch_settings()]


def test_a_run_stays_finished_if_the_sample_fails_and_restores_the_settings_of_torch(tmp_path: Path) -> None:
    ((seen, (before, after, after_refusal)),) = run_ranks(1, _around_a_broken_sample, str(tmp_path / "run"), fresh=True)
    assert seen == [1, "END", 0], "the sample may compile, and is no part of the steps"
    assert before == after == after_refusal
    assert summary(tmp_path / "run")["finished"]
    log = (tmp_path / "run.log").read_text()
    assert log.count("no sample, ") == 1
    assert "ValueError: no text from me" in log
    assert "done: 2 steps" in log
    assert not (tmp_path / "run" / "sample.txt").exists()


def _command(rank: int, world: int, run_dir: str, terminates: bool, *overrides: str) -> int:
    """Runs the command; sends SIGTERM after three lines of metrics."""

    def terminate() -> None:
        while not Path(run_dir, "metrics.jsonl").exists() or len(_curve(Path(run_dir))) < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    os.dup2(os.open(f"{run_dir}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if terminates:
        threading.Thread(target=terminate, daemon=True).start()
    return main(["train", *_SMALL, f"run_dir={run_dir}", "report=false", *overrides])


def test_sigterm_saves_and_the_same_command_continues(tmp_path: Path) -> None:
    endless = ["train.steps=100000", "train.save_every=0", "train.eval_every=0"]
    run_dir, log = tmp_path / "run", tmp_path / "run.log"
    assert run_ranks(1, _command, str(run_dir), True, *endless) == [75]
    assert "by SIGTERM after saving" in log.read_text()
    curve = _curve(run_dir)
    last = curve[-1]["step"]
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step-{last:08d}"]
    found = summary(run_dir)
    assert (found["finished"], found["steps"], found["val_loss"]) == (False, last, None)
    assert run_ranks(1, _command, str(run_dir), False, *endless, f"train.steps={last + 2}") == [0]
    resumed = _curve(run_dir)
    assert resumed[: len(curve)] == curve
    assert [line["step"] for line in resumed[len(curve) :]] == [last + 1, last + 2, last + 2]
    assert f"train.steps={last + 2} (was 100000)" in log.read_text()


def _stops(rank: int, world: int, path: str) -> tuple[int, bool]:
    """Whether the slow last file of rank 0 is there when the run of this rank has ended."""

    def stopped(*_: object) -> int:
        if rank == 0:
            time.sleep(0.5)
            Path(path).touch()
        return run.EXIT_STOPPED

    with mock.patch.object(run, "_train", stopped):
        return main(["train", *_SMALL, f"run_dir={path}.run"]), Path(path).exists()


def test_no_rank_of_a_stopped_run_ends_before_rank_0(tmp_path: Path) -> None:
    """A launcher would end the others by a signal."""
    assert run_ranks(2, _stops, str(tmp_path / "written")) == [(75, True), (75, True)]


def test_an_impossible_number_of_tokens_is_refused(tmp_path: Path) -> None:
    """A manifest's check leaves the extra alone, because it is the user's; this entry is dtrain's."""
    config, run_dir = compose([*_SMALL]), RunDir(tmp_path, tmp_path, False)
    for tokens in (-1, "many", 1.5, True, None):
        load = mock.Mock(return_value={run.TOKENS: tokens})
        engine: Any = SimpleNamespace(load=load, attempted_steps=4, applied_steps=4, rank=0, comm=ALONE)
        with pytest.raises(CheckpointError, match=r"has extra\.tokens=.*; expected a whole number from 0"):
            run._resume(config, engine, run_dir, SimpleNamespace(fingerprint="", task=None))  # type: ignore[arg-type]
