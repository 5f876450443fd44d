"""Choices that all ranks share: formats of rules, FP8 products that rank 0 times, a loss scale that is calibrated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dtrain
from dtrain.cli.resolve import compose
from dtrain.config.precision import Float8, LossScale
from dtrain.distributed.logging import logger
from dtrain.engine.step import StepEngine
from dtrain.errors import DivergenceError
from dtrain.precision.loss_scale import LossScaleState
from dtrain.train.run import run_training
from tests.helpers.net import Net
from tests.helpers.ranks import run_ranks
from tests.helpers.zoo import make

pytestmark = pytest.mark.processes

RULES = {
    **{"blocks.0": "fp16", "head": "fp32", "blocks.1.ffn": "fp32", "blocks.1.ffn.0": "bf16"},
    **{"norm": "fp16", "blocks.0.ffn_norm": "bf16", "blocks.1.attention_norm": "bf16"},  # by their own names
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4))


def trained(rank: int, world: int, engines: list[tuple[str, int]]) -> list[dict[str, float]]:
    """Checksums of the masters after steps of four micro-batches over all ranks."""
    entry, found = make("transformer"), []
    for engine, stage in engines:
        policy = dtrain.PrecisionPolicy.named("bf16", rules=RULES)
        options = {"engine": engine, "zero_stage": stage, "reproducible": engine == "native", "loss_scale": 8.0}
        built: Any = dtrain.initialize(entry.build(0), precision=policy, seed=0, **options)
        for step in range(2):
            own = [entry.batch(4 * step + i * world + rank) for i in range(4 // world)]
            for micro in built.accumulate(own):
                built.backward(entry.loss(built, micro))
            assert built.step().applied
        found.append({key: value.double().sum().item() for key, value in built.master_state().items()})
    return found


def test_several_formats_in_one_model_are_bit_equal_over_ranks_and_stages() -> None:
    """And about equal under FSDP2."""
    ((want,),) = run_ranks(1, trained, [("native", 0)])
    *found, fsdp2 = run_ranks(2, trained, [("native", 1), ("native", 3), ("fsdp2", 3)])[0]
    assert found == [want, want]
    assert fsdp2 == pytest.approx(want, rel=2e-2, abs=2e-2)


def decided(rank: int, world: int) -> tuple[list[dict[str, Any]], str]:
    """The decisions of a timed choice, and the error of another recipe on each rank."""
    policies = (
        dtrain.PrecisionPolicy.named("fp8", float8=float8)
        for float8 in (Float8(choice="timed", num_rows=32), Float8(recipe=("tensorwise", "rowwise")[rank]))
    )
    built = dtrain.initialize(build(), precision=next(policies), engine="ddp", seed=0)
    with pytest.raises(DivergenceError) as raised:
        dtrain.initialize(build(), precision=next(policies), engine="native", seed=0)
    return built.contract.to_dict()["decisions"], str(raised.value)


def test_rank_0_times_for_all_ranks_and_recipes_must_agree() -> None:
    """Two ranks that time the same never measure the same number of milliseconds."""
    (first, refusal), (second, other_refusal) = run_ranks(2, decided)
    assert first == second
    assert [(one["name"], one["bf16_ms"] > 0) for one in first] == [("1", True), ("2", True)]
    for text in (refusal, other_refusal):
        assert "contract: float8: 'grad_format' is e5m2 on rank 0 and e4m3 on rank 1" in text


def train(rank: int, world: int, run_dir: str, *overrides: str) -> int:
    words = (
        *("experiment=smoke", "precision=fp8", "precision.float8.choice=timed", "report=false"),
        *("model.hidden_dim=32", "model.num_layers=1", "launch.threads_per_rank=1", "train.sample_tokens=0"),
        *("schedule=constant", "schedule.warmup_steps=0", "train.eval_every=0", "train.eval_batches=1"),
        "train.save_every=1",
    )
    return run_training(compose([*words, f"run_dir={run_dir}", *overrides]))


def test_a_resumed_run_keeps_its_decisions(tmp_path: Path) -> None:
    contracts = []
    for words in (["train.steps=1"], ["train.steps=2"], ["train.steps=3", "precision.float8.recipe=rowwise"]):
        assert run_ranks(1, train, str(tmp_path), *words) == [0]
        contracts.append(json.loads((tmp_path / "precision.json").read_text(encoding="utf-8")))
    before, same, after = contracts
    assert before["decisions"]
    assert all(decision["bf16_ms"] > 0 for decision in before["decisions"])
    assert same == before, "timed again, the milliseconds would be others"
    assert after["float8"]["recipe"] == "rowwise"
    assert after["decisions"] != before["decisions"], "other products are timed again"


ENGINES = [("native", 0), ("native", 3), ("ddp", 0), ("fsdp2", 2)]


def build_sum(engine: str, stage: int) -> Any:
    torch.manual_seed(0)
    scale = LossScale("calibrated", init=1024.0, calibration_steps=3)
    parts = {name: nn.Linear(4, 1, bias=False) for name in ("first", "second")}
    model = Net(lambda net, x: net.first(x) + net.second(0.5 * x), **parts)  # its gradients are what it is given
    return dtrain.initialize(model, engine=engine, zero_stage=stage, precision="fp16", loss_scale=scale, seed=0)


def take_step(engine: StepEngine, step: int) -> float:
    """Returns the loss scale; only once, on one rank, in one micro-batch, is a gradient as large as 0.75."""
    numbers = [0, 1]
    for number in engine.accumulate(numbers):
        x = torch.full((1, 4), -0.01)
        x[0, number] = -0.75 if (engine.rank, step, number) == (1, 1, 0) else -0.125 * (1 + step % 2)
        # neither a weight nor the sum of the two is part of what is measured
        engine.backward(engine(x).mean(), weight=16.0)
    return engine.step().loss_scale


def train_calibrated(rank: int, world: int) -> dict[tuple[str, int], tuple[list[float], LossScaleState, str]]:
    found = {}
    for name, stage in ENGINES:
        engine = build_sum(name, stage)
        with mock.patch.object(logger, "info") as info:
            scales = [take_step(engine, step) for step in range(5)]
        lines = [call.args[0] % call.args[1:] for call in info.call_args_list]
        (line,) = (line for line in lines if "FP16 flushes" in line)
        found[name, stage] = scales, engine.loss_scale, line
    return found


def test_all_ranks_choose_from_the_largest_gradient_of_all() -> None:
    for found in run_ranks(2, train_calibrated):
        for engine, (scales, state, line) in found.items():
            assert state.max_abs_grad == 0.75, engine
            # 65,504 / (8 x 0.75) = 10,917
            assert scales == [1024.0, 1024.0, 1024.0, 8192.0, 8192.0], engine
            assert line == (
                "loss scale calibrated to 8192: largest gradient 7.5e-01 x 8192 x margin 8 = 4.92e+04 <= 65,504; of "
                "the measured gradients FP16 flushes 0.00% to zero at scale 1, 0.00% at 8192"
            ), engine
