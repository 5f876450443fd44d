"""A run in FP8 whose last steps compute in BF16."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import dtrain
from dtrain.__main__ import main
from dtrain.checkpoint.format.integrity import load_manifest
from dtrain.cli.checks import check_suite
from dtrain.cli.resolve import compose
from dtrain.config.precision import Float8, PrecisionConfig
from dtrain.config.tool_schema import ParitySuiteConfig
from dtrain.distributed.progress import Phase
from dtrain.errors import ConfigError, UsageError
from dtrain.measure.replay.source import read_run
from dtrain.telemetry.metrics import TIMES, read_metrics
from dtrain.train.run import run_training
from tests.engines.helpers import fingerprints
from tests.helpers.ranks import run_ranks

# dropout, so that random numbers matter; an average and two kinds of formats beside FP8
KEYS = [
    *("model=tiny", "model.num_layers=2", "model.hidden_dim=32", "model.num_heads=2", "model.max_seq_len=32"),
    *("model.dropout=0.1", "ema.decay=0.9", "optim.compile=false", "precision=fp8", "precision.rules={blocks.1: fp32}"),
    *("engine.reproducible=true", "launch.device=cpu", "launch.threads_per_rank=1", "supervise.enabled=false"),
    *("train.micro_batch_size=1", "train.global_batch_size=4", "train.log_every=1", "train.eval_every=0"),
    *("train.eval_batches=2", "train.save_every=1", "train.sample_tokens=0", "train.steps=6", "report=false"),
    *("schedule.total_steps=6", "schedule.warmup_steps=1", "checkpoint.keep_last=9", "telemetry.precision_every=2"),
]
FINISH = ("precision.float8.finish_in=bf16", "precision.float8.finish_steps=3")


def _train(run_dir: Path, *keys: str) -> None:
    assert main(["train", *KEYS, *keys, f"run_dir={run_dir}"]) == 0


def _by_hand(run_dir: Path, *keys: str) -> None:
    """Saves at the switch, and resumes in BF16."""
    _train(run_dir, *keys, "train.steps=3")
    _train(run_dir, *keys, "precision=bf16")


def _curve(run_dir: Path) -> list[dict[str, Any]]:
    lines = read_metrics(run_dir / "metrics.jsonl")
    return [{key: line[key] for key in line if key not in TIMES} for line in lines]


def _states(run_dir: Path) -> list[Any]:
    return [fingerprints(path) for path in sorted((run_dir / "checkpoints").glob("step-*"))]


def _resumed(run: Path, to: Path, steps: Sequence[int]) -> Path:
    """Copies a run as it was when it had saved ``steps``, and starts it again."""
    shutil.copytree(run, to)
    for path in (to / "checkpoints").glob("step-*"):
        if int(path.name[-8:]) not in steps:
            shutil.rmtree(path)
    (to / "summary.json").unlink()
    return to


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("finish") / "run"
    _train(run_dir, *FINISH)
    return run_dir


def test_the_last_steps_equal_a_resume_in_bf16(whole: Path, tmp_path: Path) -> None:
    """In losses, norms, rates and validations; in weights, moments, averages and counters."""
    _by_hand(tmp_path / "run")
    curve = _curve(whole)
    assert [line["format"] for line in curve if "loss" in line] == ["fp8"] * 3 + ["bf16"] * 3
    assert curve == _curve(tmp_path / "run")
    assert len(_states(whole)) == 6
    assert _states(whole) == _states(tmp_path / "run")
    never = tmp_path / "never"
    _train(never)
    assert _curve(never)[:4] == curve[:4]
    assert _states(never)[2] == _states(whole)[2]
    assert _states(never)[3] != _states(whole)[3]


def test_the_switch_changes_no_state(whole: Path, tmp_path: Path) -> None:
    session = dtrain.Session.open(overrides=[*KEYS, "precision=bf16"])
    before = whole / "checkpoints/step-00000003"
    session.engine.load(before)
    path = session.engine.save(tmp_path)
    assert path is not None
    assert fingerprints(path) == fingerprints(before)
    old, new = (load_manifest(folder).state for folder in (before, path))
    for key in ("engine_state", "rng", "data_cursor", "optimizer", "aliases", "run_id"):
        assert old[key] == new[key], key
    for name, master in session.engine.master_state().items():
        weight = session.engine.module.get_parameter(name)
        assert torch.equal(weight, master.to(weight.dtype)), "a replica is the cast of its master"


@pytest.mark.parametrize(("steps", "first"), [((2,), "fp8"), ((3,), "bf16"), ((4, 5), "bf16")])
def test_a_resume_continues_in_the_precision_of_its_step(
    whole: Path, tmp_path: Path, steps: Sequence[int], first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = _resumed(whole, tmp_path / "run", steps)
    _train(run_dir, *FINISH)
    log = capsys.readouterr().err
    assert log.count("step 3: the last 3 steps compute in BF16\n") == 1
    assert log.index(f"precision {first}: ") < log.index("loaded step ")
    assert ("precision fp8: " in log) == (first == "fp8")
    assert "another format" not in log, "what the user asked for is no warning"
    assert _curve(run_dir) == _curve(whole)
    assert _states(run_dir)[-1] == _states(whole)[-1]


def test_a_damaged_checkpoint_of_the_finish_leads_back_to_fp8(whole: Path, tmp_path: Path) -> None:
    run_dir = _resumed(whole, tmp_path / "run", (2, 4))
    shard = run_dir / "checkpoints/step-00000004/r0000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    _train(run_dir, *FINISH)
    assert _curve(run_dir) == _curve(whole)
    assert _states(run_dir)[-1] == _states(whole)[-1]


def test_the_files_of_a_run_name_the_switch(whole: Path) -> None:
    contract = json.loads((whole / "precision.json").read_text())
    assert contract == json.loads((whole / "summary.json").read_text())["contract"]
    before = json.loads((whole / "precision-until-step-3.json").read_text())
    assert (before["precision"], contract["precision"]) == ("fp8", "bf16")
    assert (before["float8"]["finish_in"], before["float8"]["finish_steps"]) == ("bf16", 3)
    formats = {name: contract["modules"][f"{name}.attn.qkv"]["format"] for name in ("blocks.0", "blocks.1")}
    assert formats == {"blocks.0": "bf16", "blocks.1": "fp32"}, "rules of other formats stay"
    assert "finish_in: bf16" in (whole / "config.yaml").read_text()
    assert not [*whole.glob("config-until-*")]


def test_the_switch_is_a_start_for_the_watcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose limit of a step would end a run that builds an engine."""
    phases: list[tuple[Phase, int]] = []
    begin = dtrain.distributed.progress.Progress.begin

    def noted(self: Any, phase: Phase, step: int | None = None) -> None:
        phases.append((phase, len(list(tmp_path.glob("run/checkpoints/step-*")))))
        begin(self, phase, step)

    monkeypatch.setattr(dtrain.distributed.progress.Progress, "begin", noted)
    _train(tmp_path / "run", *FINISH, "train.save_every=0")
    assert (Phase.START, 1) in phases


def test_a_replay_takes_the_precision_of_its_step(whole: Path, tmp_path: Path) -> None:
    early, late = (read_run(whole, step) for step in (3, 5))
    assert (early.config.precision.name, late.config.precision.name) == ("fp8", "bf16")
    assert early.contract["precision"] == "fp8"
    assert [int(path.name[-8:]) for path in late.checkpoints] == [4, 3]
    gone = _resumed(whole, tmp_path / "run", (1, 6))
    (gone / "summary.json").write_bytes((whole / "summary.json").read_bytes())
    with pytest.raises(ConfigError, match=r"step=5 computes in another precision than the steps up to 3"):
        read_run(gone, 5)


def test_an_own_loop_saves_and_loads_in_an_engine_in_bf16(tmp_path: Path) -> None:
    """As docs/precision/fp8.md says."""
    torch.manual_seed(0)
    build = lambda: torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))  # noqa: E731
    options: dict[str, Any] = {"optimizer": dtrain.AdamW(lr=1e-2), "seed": 1, "reproducible": True}

    def train(engine: Any, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            data = torch.randn(8, 16, generator=torch.Generator().manual_seed(engine.attempted_steps))
            engine.backward(engine(data).square().mean())
            losses.append(engine.step().loss)
        return losses

    engine = dtrain.initialize(build(), precision="fp8", **options)
    assert engine.contract.float8_modules == ("1",)
    losses = train(engine, 3)
    masters = engine.master_state()
    engine.save(tmp_path)
    del engine
    finish = dtrain.initialize(build(), precision="bf16", **options)
    finish.load(tmp_path)
    assert finish.attempted_steps == 3
    assert all(torch.equal(value, masters[name]) for name, value in finish.master_state().items())
    assert {p.dtype for p in finish.module.parameters()} == {torch.bfloat16}
    assert max(train(finish, 2)) < min(losses), "it trains on"


def test_a_session_says_when_its_engine_must_change() -> None:
    session = dtrain.Session.open(overrides=[*KEYS, *FINISH, "precision.float8.finish_steps=5"])
    session.step()
    with pytest.raises(UsageError, match=r"after step 1 this run computes in bf16 .*: save, open a Session with"):
        session.step()


MISTAKES = {
    "precision.float8.finish_steps=6": r"finish_steps=6 is not below train.steps=6, so that no step .*; lower it",
    "precision.float8.finish_in=fp16": "finish_in=fp16 is not one of none, bf16",
    "precision.float8.finish_in=none": r"precision.float8.finish_steps=3 is not used with precision.float8.finish_in",
    "precision=bf16": r"finish_in=bf16 is not used with precision=bf16 and no fp8 rule; .* set precision=fp8",
    "engine=deepspeed": "engine=deepspeed cannot do precision=fp8",
}


@pytest.mark.parametrize("key", MISTAKES)
def test_mistakes_are_refused_before_anything_starts(key: str) -> None:
    with pytest.raises(ConfigError, match=MISTAKES[key]):
        compose([*KEYS, "precision.rules={}", "engine.reproducible=false", *FINISH, key])


def test_a_model_without_a_module_in_fp8_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = [*KEYS, *FINISH, "precision.rules={'*': bf16}", f"run_dir={tmp_path}/run"]
    with pytest.raises(ConfigError, match=r"finish_in=bf16, but no module of this model can be FP8"):
        run_training(compose(keys))
    assert not (tmp_path / "run").exists()


def test_other_verbs_refuse_a_finish() -> None:
    precision = PrecisionConfig("fp8", float8=Float8(finish_in="bf16"))
    with pytest.raises(ConfigError, match=r"finish_in=bf16 is for dtrain train; remove it"):
        check_suite(ParitySuiteConfig(precision=precision))


def test_a_rule_in_fp8_finishes_in_bf16_too() -> None:
    given = PrecisionConfig("auto", {"a": "fp8", "b": "fp32"}, float8=Float8(finish_in="bf16"))
    assert given.finish() == PrecisionConfig("bf16", {"a": "bf16", "b": "fp32"})


def test_a_run_without_a_finish_is_one_part() -> None:
    config = compose(KEYS)
    assert config.parts == (config,)
    assert config.at(10**6) is config


def _run(rank: int, world: int, run_dir: str, *keys: str) -> int:
    logging.getLogger("dtrain").setLevel(logging.WARNING)
    return run_training(compose([*KEYS, f"run_dir={run_dir}", *keys]))


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["native", "fsdp2", "ddp"])
def test_two_ranks_switch_together(tmp_path: Path, engine: str) -> None:
    keys = ("precision.rules={}", f"engine={engine}", f"engine.reproducible={str(engine == 'native').lower()}")
    assert run_ranks(2, _run, f"{tmp_path}/run", *keys, *FINISH) == [0, 0]
    assert run_ranks(2, _run, f"{tmp_path}/hand", *keys, "train.steps=3") == [0, 0]
    assert run_ranks(2, _run, f"{tmp_path}/hand", *keys, "precision=bf16") == [0, 0]
    found = [[line for line in _curve(tmp_path / name) if "loss" in line] for name in ("run", "hand")]
    assert [line["format"] for line in found[0]] == ["fp8"] * 3 + ["bf16"] * 3
    assert found[0] == found[1]
    assert _states(tmp_path / "run")[-1] == _states(tmp_path / "hand")[-1]
