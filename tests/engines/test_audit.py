"""Audits and replays on one rank: quantized copies, what they cost, replays that fail, and saves under way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.errors import CheckpointError, ConfigError, UsageError
from dtrain.parameters.model_states import MASTER
from tests.engines import float8_model
from tests.engines.checks.audits import corruptions, flaky, flip_master
from tests.engines.helpers import start, state_digests, train_step
from tests.helpers.bit_flips import flip_bit


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise"])
def test_quantized_copies_and_scales_follow_from_the_masters(recipe: str, tmp_path: Path) -> None:
    policy = dtrain.PrecisionPolicy.named("fp8", float8=dtrain.Float8(recipe=recipe))
    engine = float8_model.start("native", 3, policy, audit=1)

    def step() -> None:
        engine.backward(engine(tokens=float8_model.batch(engine.attempted_steps)))
        engine.step()

    step()
    engine.save(tmp_path)
    step()
    shards = [shard for shard in engine.states.compute_shards() if shard.data.dtype == torch.float8_e4m3fn]
    kinds = {shard.kind for shard in engine.states.compute_shards()}
    of_columns = {"compute replica (columns)"} if recipe.startswith("rowwise") else set()
    assert kinds == {"compute replica", "FP8 scale"} | of_columns
    scales = [shard for shard in engine.states.compute_shards() if shard.kind == "FP8 scale"]
    for shard, bit in ((shards[0], 0), (shards[-1], 7), (scales[-1], 23)):
        flip_bit(shard.data, shard.data.numel() - 1, bit)
        # with another scale, such as a stale one, the copies are not the casts any more
        assert ((0,), shard.name, shard.kind) in corruptions(step)
        engine.load(tmp_path)
        step()


@pytest.mark.parametrize(("every", "more"), [(0, [0, 0, 0, 0, 0, 0]), (3, [0, 0, 1, 0, 0, 1])])
def test_collectives_of_an_audit(every: int, more: list[int]) -> None:
    """The record of step 3 is checked in step 4, with one collective."""
    engine = start("native", 2, audit=every)
    issued = []
    for _ in range(7):
        before = engine.comm.schedule.num_issued
        if every == 0:
            engine.expect_save()
        train_step(engine, 1)
        issued.append(engine.comm.schedule.num_issued - before)
    assert [count - issued[1] for count in issued[1:]] == more


def test_a_replay_that_fails_is_an_error_of_the_step() -> None:
    engine = start("native", 2, audit=dtrain.Audit(replay_every=1))
    calls = 0

    def on_forward(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("scatter has no deterministic implementation")

    handle = engine.module.register_forward_hook(on_forward)
    with pytest.raises(UsageError, match=r"replay_every.*rank 0: RuntimeError: scatter has no"):
        train_step(engine, 1)
    handle.remove()
    train_step(engine, 1)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_replay_of_a_random_forward_in_eval_mode_leaves_no_trace() -> None:
    engine = start("native", 2, audit=dtrain.Audit(replay_every=1))
    engine.module.eval()

    def on_forward(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output * torch.rand(())

    engine.module.register_forward_hook(on_forward)
    torch.manual_seed(1)
    train_step(engine, 1)
    after = torch.rand(())
    torch.manual_seed(1)
    torch.rand(())  # of the one forward
    assert after == torch.rand(())


def test_a_save_after_a_replay_that_failed_is_still_compared(tmp_path: Path) -> None:
    engine = start("native", 2, audit=dtrain.Audit(every=1, replay_every=2))
    train_step(engine, 1)
    handle = flaky(engine, 0, in_backward=False)
    assert corruptions(lambda: train_step(engine, 1))[0][2] == "loss"
    handle.remove()
    name = flip_master(engine, 0)
    assert corruptions(lambda: engine.save(tmp_path)) == [((0,), name, MASTER)]
    assert not list(tmp_path.glob("step-*"))


def test_a_load_replaces_what_a_save_under_way_found_corrupt(tmp_path: Path) -> None:
    engine = start("native", 2, audit=1)
    train_step(engine, 1)
    engine.save(tmp_path)
    before = state_digests(engine)
    for path in (tmp_path, tmp_path / "none"):
        train_step(engine, 1)
        moment = next(shard for shard in engine.states.local_shards("exp_avg") if shard.data.numel())
        flip_bit(moment.data, 0, 20)  # it has no second copy, so only the thread that writes it can tell
        engine.save(tmp_path, asynchronous=True)
        if path.exists():
            engine.load(path)
            assert state_digests(engine) == before
            continue
        with pytest.raises(CheckpointError):
            engine.load(path)
        corruptions(lambda: train_step(engine, 1))  # nothing was loaded


@pytest.mark.parametrize(
    ("audit", "reason"),
    [
        (-1, "audit=-1 is too small"),
        ("often", "audit='often' is not a whole number"),
        (dtrain.Audit(replay_every=3), "engine=deepspeed cannot do audit.replay_every=above 0: DeepSpeed would reduce"),
    ],
)
def test_refused(audit: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        dtrain.initialize(nn.Linear(2, 2), engine="deepspeed", audit=audit)
