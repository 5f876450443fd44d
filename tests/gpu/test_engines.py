"""The engines over other libraries on one GPU: against the oracle, skipped steps, and from one to another."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import dtrain
from dtrain.config.capabilities import CAPABILITIES
from dtrain.models import build_model
from tests.gpu.device import ON_CPU
from tests.gpu.test_engine import CONFIG, STEPS, VOCAB, batch, train
from tests.gpu.test_engine import make_engine as make_native
from tests.helpers.oracle import AdamWSettings, Oracle, normwise_error

pytestmark = pytest.mark.usefixtures("one_rank_of_nccl")

OTHERS = [("fsdp2", 2), ("fsdp2", 3), ("ddp", 0), *(("deepspeed", stage) for stage in range(4))]
ENGINES = [*(("native", stage) for stage in range(4)), *OTHERS]


def make_engine(engine: str, stage: int, precision: str, **options: object) -> Any:
    if missing_requirement := CAPABILITIES[engine].missing_requirement:
        pytest.skip(f"engine={engine} {missing_requirement}")
    return make_native(precision, stage, engine=engine, **options)


def skip_unsupported(engine: str, precision: str) -> None:
    if ON_CPU and ((engine, precision) == ("deepspeed", "fp16") or precision == "tf32"):
        pytest.skip("needs a GPU: TF32, and FP16 of DeepSpeed")


@pytest.mark.parametrize(("engine", "stage"), ENGINES)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("tf32", 5e-3), ("bf16", 2e-2), ("fp16", 1e-2)])
def test_follows_the_oracle(engine: str, stage: int, precision: str, tolerance: float) -> None:
    skip_unsupported(engine, precision)
    loss_scale = 1024.0 if precision == "fp16" else "auto"
    made = make_engine(engine, stage, precision, loss_scale=loss_scale)
    outcomes = train(made, STEPS)
    oracle = Oracle(build_model(CONFIG, VOCAB, seed=0), optimizer=AdamWSettings(lr=1e-3), max_grad_norm=0.5)
    steps = [oracle.step([(batch(2 * s), 1 + s % 2), (batch(2 * s + 1), 1 + s % 2)]) for s in range(STEPS)]
    assert all(outcome.applied for outcome in outcomes)
    assert normwise_error(made.master_state(), oracle.masters()) < tolerance
    assert outcomes[-1].loss == pytest.approx(steps[-1].loss, rel=tolerance)


@pytest.mark.parametrize(("engine", "stage"), ENGINES)
def test_a_loss_scale_that_is_too_large_is_skipped_and_recovers(engine: str, stage: int) -> None:
    skip_unsupported(engine, "fp16")
    made = make_engine(engine, stage, "fp16", loss_scale=dtrain.LossScale(mode="dynamic", init=2.0**24))
    before = made.master_state()
    first = train(made, 1)[0]
    assert first.reason == "overflow"
    assert first.culprit is not None
    assert all(torch.equal(before[name], tensor) for name, tensor in made.master_state().items())
    applied = [outcome.applied for outcome in train(made, 19)]
    # the scale comes down to where gradients just fit, so a few that grow later may overflow again
    assert applied[applied.index(True) :].count(False) <= 2, applied


@pytest.mark.parametrize(("engine", "stage"), OTHERS)
def test_goes_on_from_the_native_engine(engine: str, stage: int, tmp_path: Path) -> None:
    native = make_engine("native", 2, "bf16")
    train(native, 2)
    native.save(tmp_path)
    made = make_engine(engine, stage, "bf16")
    made.load(tmp_path)
    want = dict(native.states.full_state("exp_avg"))
    assert all(torch.equal(want[name], tensor) for name, tensor in made.states.full_state("exp_avg"))
    expected, got = train(native, 3), train(made, 3)
    assert [outcome.loss for outcome in got] == pytest.approx([outcome.loss for outcome in expected], rel=5e-3)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_offloaded_states_lie_in_host_memory() -> None:
    made = make_engine("deepspeed", 2, "bf16", offload="cpu")
    assert all(outcome.applied for outcome in train(made, 2))
    assert {shard.data.device.type for shard in made.states.owned_shards("master")} == {"cpu"}
    assert ON_CPU or {"master", "moments"} <= set(made.host_kinds)
