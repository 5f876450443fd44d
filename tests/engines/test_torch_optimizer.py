"""Optimizers of torch under the engines: the bits do not depend on the sharding, and every engine resumes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtrain
from dtrain.engine.step import StepEngine
from dtrain.errors import CheckpointError
from tests.engines.helpers import STATE, digest, start, train_step
from tests.helpers.one_rank import build as small_model
from tests.helpers.one_rank import loss_of, unchanged
from tests.helpers.one_rank import start as start_small
from tests.helpers.one_rank import train_step as train_small
from tests.helpers.ranks import run_ranks

NADAM = dtrain.TorchOptimizer(
    torch.optim.NAdam,
    lr=3e-3,
    weight_decay=0.1,
    momentum_decay=0.1,
    groups={"blocks.*": {"betas": (0.8, 0.9), "lr_factor": 0.5}, "head.bias": {"weight_decay": 0.2}},
)
RADAM = dtrain.TorchOptimizer(torch.optim.RAdam, lr=3e-3, betas=(0.9, 0.9))
MICRO_BATCHES = 2
STEPS = 7  # RAdam changes its formula at the sixth


@pytest.mark.parametrize("engine", ["native", "ddp"])
@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.RAdam])
def test_follows_torch(engine: str, optimizer: Any) -> None:
    record = dtrain.TorchOptimizer(optimizer, lr=0.05)
    trained = start_small(engine=engine, optimizer=record, max_grad_norm=None)
    model = small_model()
    reference = optimizer(model.parameters(), lr=0.05)
    for _ in range(10):
        assert train_small(trained).applied
        reference.zero_grad()
        loss_of(model).backward()
        reference.step()
    got = trained.master_state()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.detach(), rtol=1e-6, atol=1e-6)


def test_groups_keep_states_of_their_own() -> None:
    """Sorted by name, the parameters with ``grad_avg`` would not be adjacent in the flat buffer."""
    groups: dict[str, Any] = {"0.0.weight": {"momentum": 0.9}, "0.1": {"centered": True}}
    groups["0.2.weight"] = {"momentum": 0.9, "centered": True}
    record = dtrain.TorchOptimizer(torch.optim.RMSprop, lr=0.05, groups=groups)
    trained = start_small(nn.Sequential(small_model()), optimizer=record, max_grad_norm=None)
    model = small_model()
    parameters = dict(model.named_parameters(prefix="0"))
    changes = {name: groups.get(name, groups.get(name[:3], {})) for name in parameters}
    reference = torch.optim.RMSprop([{"params": [p], **changes[name]} for name, p in parameters.items()], lr=0.05)
    for _ in range(3):
        assert train_small(trained).applied
        reference.zero_grad()
        loss_of(model).backward()
        reference.step()
    for name, got in trained.master_state().items():
        torch.testing.assert_close(got, parameters[name].detach(), rtol=1e-6, atol=1e-6)


def test_a_checkpoint_of_other_groups_leaves_the_engine_as_it_is(tmp_path: Path) -> None:
    engine = start_small(optimizer=dtrain.TorchOptimizer(torch.optim.NAdam, lr=0.01))
    assert train_small(engine).applied
    engine.save(tmp_path)
    other = start_small(optimizer=dtrain.TorchOptimizer(torch.optim.NAdam, lr=0.01, groups={"2": {"eps": 1e-6}}))
    before = other.master_state()
    with pytest.raises(CheckpointError, match="holds the numbers of 1 optimizer groups, this run has 2"):
        other.load(tmp_path)
    assert unchanged(other, before)
    assert train_small(other).applied


def test_checkpoints_of_adamw_are_exchanged(tmp_path: Path) -> None:
    options: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    engine = start_small(optimizer=dtrain.AdamW(lr=0.01, **options))
    for _ in range(3):
        train_small(engine)
    engine.save(tmp_path / "adamw")
    adopted = start_small(optimizer=dtrain.TorchOptimizer(torch.optim.AdamW, lr=0.01, **options))
    adopted.load(tmp_path / "adamw")
    for trained in (engine, adopted):
        assert train_small(trained).applied
    expected, got = engine.master_state(), adopted.master_state()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-6, atol=1e-7)
    adopted.save(tmp_path / "torch")
    engine.load(tmp_path / "torch")
    assert all(map(torch.equal, engine.master_state().values(), got.values()))


def train_all(rank: int, world: int, stages: tuple[int, ...], folder: Path) -> dict[str, dict[str, str]]:
    """Digests of the state after training each optimizer at each stage; saves NAdam in the middle."""
    found = {}
    for stage in stages:
        for record in (NADAM, RADAM):
            engine = start("native", stage, optimizer=record, precision="bf16", reproducible=True)
            for step in range(STEPS):
                if step == 3 and record is NADAM:
                    engine.save(folder / f"{stage}-{world}")
                assert train_step(engine, MICRO_BATCHES).applied
            found[f"{record.factory} {stage}"] = state_of(engine)
    return found


def resume_all(
    rank: int, world: int, jobs: list[tuple[str, int, str]], folder: Path
) -> list[tuple[dict[str, str], dict[str, Any]]]:
    """Digests of the state, and the masters, after training on from each checkpoint."""
    found = []
    for name, stage, source in jobs:
        options = {"precision": "bf16", "reproducible": True} if name == "native" else {"precision": "fp32"}
        engine = start(name, stage, optimizer=NADAM, seed=7, **options)
        engine.load(folder / source)
        before = state_of(engine)
        for _ in range(STEPS - 3):
            assert train_step(engine, MICRO_BATCHES).applied
        assert state_of(engine) != before
        found.append((state_of(engine), {name: tensor.numpy() for name, tensor in engine.full_state("master")}))
    return found


def state_of(engine: StepEngine) -> dict[str, str]:
    return {f"{kind}:{name}": digest(tensor) for kind in STATE for name, tensor in engine.full_state(kind)}


@pytest.mark.processes
def test_the_bits_are_those_of_every_stage_and_world_size(tmp_path: Path) -> None:
    alone = run_ranks(1, train_all, (0, 2), tmp_path)[0]
    both = run_ranks(2, train_all, (0, 1, 2, 3), tmp_path)
    assert both[0] == both[1]
    for name in ("NAdam", "RAdam"):
        found = [state for label, state in [*alone.items(), *both[0].items()] if name in label]
        assert len(found) == 6
        assert all(state == found[0] for state in found)
    # from the middle of NAdam's run, whose mu_product depends on all earlier updates
    expected = next(iter(alone.values()))
    jobs = [("native", 0, "3-2"), ("native", 3, "2-1"), ("ddp", 0, "1-2")]
    *native, (_, masters) = run_ranks(1, resume_all, jobs, tmp_path)[0]
    assert [state for state, _ in native] == [expected, expected]
    jobs = [("native", 3, "0-1"), ("ddp", 0, "0-1"), ("fsdp2", 3, "0-1")]
    for (state, _), *others in run_ranks(2, resume_all, jobs, tmp_path):
        assert state == expected
        for _, found in others:  # their sums of micro-batches are in another order
            for name, master in found.items():
                torch.testing.assert_close(torch.tensor(master), torch.tensor(masters[name]), rtol=1e-4, atol=1e-5)


def train_library(rank: int, world: int, source: Path, target: Path) -> None:
    """Resumes NAdam under DeepSpeed, and what DeepSpeed has saved under native."""
    engine = start("deepspeed", 2, optimizer=NADAM, precision="fp32", seed=7)
    engine.load(source)
    assert train_step(engine, MICRO_BATCHES).applied
    engine.save(target)
    loaded = start("native", 2, optimizer=NADAM, precision="fp32", seed=8)
    loaded.load(source)
    assert train_step(loaded, MICRO_BATCHES).applied
    got = dict(engine.full_state("master"))
    for name, master in loaded.full_state("master"):
        torch.testing.assert_close(got[name], master, rtol=1e-4, atol=1e-5)
    loaded.load(target)
    assert state_of(loaded) == state_of(engine)


@pytest.mark.processes
def test_deepspeed_resumes_and_saves(tmp_path: Path) -> None:
    run_ranks(1, train_all, (0,), tmp_path)
    run_ranks(2, train_library, tmp_path / "0-1", tmp_path / "deepspeed")
