"""Rules on several ranks; and the choice of FP8 products: rank 0 takes it for all, and a run that goes on keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtrain
from dtrain.cli.resolve import compose
from dtrain.config.precision import Float8
from dtrain.errors import DivergenceError
from dtrain.train.run import run_training
from tests.helpers.ranks import run_ranks
from tests.helpers.zoo import make

pytestmark = pytest.mark.processes

RULES = {
    **{"blocks.0": "fp16", "head": "fp32", "blocks.1.ffn": "fp32", "blocks.1.ffn.0": "bf16"},
    **{"norm": "fp16", "blocks.0.ffn_norm": "bf16", "blocks.1.attention_norm": "bf16"},  # by their own names
}
TIMED = Float8(choice="timed", num_rows=32)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4))


def trained(rank: int, world: int, engine: str, stage: int) -> dict[str, float]:
    """Checksums of the masters after steps of four micro-batches over all ranks."""
    torch.set_num_threads(1)
    entry = make("transformer")
    built = dtrain.initialize(
        entry.build(0),
        engine=engine,
        precision=dtrain.PrecisionPolicy.named("bf16", rules=RULES),
        zero_stage=stage,
        reproducible=engine == "native",
        loss_scale=8.0,
        seed=0,
    )
    for step in range(2):
        own = [entry.batch(4 * step + i * world + rank) for i in range(4 // world)]
        for micro in built.accumulate(own):
            built.backward(entry.loss(built, micro))
        assert built.step().applied
    return {key: value.double().sum().item() for key, value in built.master_state().items()}


def test_several_formats_in_one_model_are_bit_equal_over_ranks_and_stages() -> None:
    want = run_ranks(1, trained, "native", 0)[0]
    for stage in (1, 3):
        assert run_ranks(2, trained, "native", stage)[0] == want, stage


def test_several_formats_in_one_model_under_fsdp2() -> None:
    want, found = run_ranks(1, trained, "native", 2)[0], run_ranks(2, trained, "fsdp2", 3)[0]
    assert found == pytest.approx(want, rel=2e-2, abs=2e-2)


def decided(rank: int, world: int, engine: str) -> list[dict[str, Any]]:
    policy = dtrain.PrecisionPolicy.named("fp8", float8=TIMED)
    built = dtrain.initialize(build(), precision=policy, engine=engine, seed=0)
    decisions: list[dict[str, Any]] = built.contract.to_dict()["decisions"]
    return decisions


def test_rank_0_times_for_all_ranks() -> None:
    """Two ranks that time the same never measure the same number of milliseconds."""
    first, second = run_ranks(2, decided, "ddp")
    assert first == second
    assert [decision["name"] for decision in first] == ["1", "2"]
    assert first[0]["bf16_ms"] > 0
    assert first[0]["float8_ms"] > 0


def differs(rank: int, world: int) -> str:
    recipe = ("tensorwise", "rowwise")[rank]
    policy = dtrain.PrecisionPolicy.named("fp8", float8=Float8(recipe=recipe))
    with pytest.raises(DivergenceError) as raised:
        dtrain.initialize(build(), precision=policy, engine="native", seed=0)
    return str(raised.value)


def test_ranks_of_different_recipes_are_refused() -> None:
    for said in run_ranks(2, differs):
        assert "contract: float8: 'grad_format' is e5m2 on rank 0 and e4m3 on rank 1" in said


def train(rank: int, world: int, run_dir: str, *overrides: str) -> int:
    small = ["experiment=smoke", "precision=fp8", "precision.float8.choice=timed", "train.sample_tokens=0"]
    sizes = [
        "model.hidden_dim=32",
        "model.num_heads=2",
        "launch.threads_per_rank=1",
        "schedule=constant",
        "schedule.warmup_steps=0",
    ]
    steps = ["train.eval_every=0", "train.eval_batches=1", "train.save_every=1"]
    return run_training(compose([*small, *sizes, *steps, f"run_dir={run_dir}", *overrides]))


def contract_in(run_dir: Path) -> dict[str, Any]:
    contract: dict[str, Any] = json.loads((run_dir / "precision.json").read_text(encoding="utf-8"))
    return contract


def test_a_resumed_run_keeps_its_decisions(tmp_path: Path) -> None:
    assert run_ranks(1, train, str(tmp_path), "train.steps=1") == [0]
    before = contract_in(tmp_path)
    assert before["decisions"]
    assert all(decision["bf16_ms"] > 0 for decision in before["decisions"])
    assert run_ranks(1, train, str(tmp_path), "train.steps=2") == [0]
    assert contract_in(tmp_path) == before, "timed again, the milliseconds would be others"
    assert run_ranks(1, train, str(tmp_path), "train.steps=3", "precision.float8.recipe=rowwise") == [0]
    after = contract_in(tmp_path)
    assert after["float8"]["recipe"] == "rowwise"
    assert after["decisions"] != before["decisions"], "other products are timed again"
