"""Reductions overlap backward, in one order on all ranks, whatever each rank's graph looks like."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dtrain
from dtrain.engine.native import NativeEngine
from dtrain.errors import CommunicationError, DivergenceError
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, forward_backward, start

pytestmark = pytest.mark.processes


def trace(rank: int, world: int, stage: int) -> list[str]:
    """Gradients and collectives of one step, in the order in which they happened."""
    run = Run("transformer", options={"precision": "bf16", "zero_stage": stage})
    engine = start(run)
    events: list[str] = []
    for name, parameter in engine.module.named_parameters():
        parameter.register_hook(lambda _, name=name: events.append(f"grad {name}"))
    schedule = engine.comm.schedule
    record = schedule.record

    def traced(op: str, label: str, tensor: torch.Tensor) -> str:
        if op in ("all_to_all_single", "reduce_scatter_sum"):
            events.append(f"reduce {label}")
        return record(op, label, tensor)

    schedule.record = traced
    forward_backward(engine, run, 0)
    engine.step()
    return events


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_first_collective_starts_before_the_last_gradient(stage: int) -> None:
    for events in run_ranks(2, trace, stage):
        first_reduce = next(i for i, e in enumerate(events) if e.startswith("reduce"))
        last_grad = max(i for i, e in enumerate(events) if e.startswith("grad"))
        assert first_reduce < last_grad
        assert events[first_reduce].startswith("reduce blocks."), "the last block is complete first"
        assert events[-1].startswith("reduce root/"), "the root, with the embedding, is complete last"


class Branches(nn.Module):
    """Rank 0 uses one branch, rank 1 the other."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.head(self.branches[branch](x)).square().mean()


def train_branches(rank: int, world: int, stage: int) -> tuple[list[bool], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    engine = dtrain.initialize(Branches(), precision="fp32", zero_stage=stage, seed=0)
    assert isinstance(engine, NativeEngine)
    applied = []
    for step in range(4):
        x = torch.full((2, 4), float(rank + step + 1))
        for _ in engine.accumulate(range(2)):
            engine.backward(engine(x, branch=rank))
        applied.append(engine.step().applied)
    return applied, engine.master_state()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_may_take_different_branches(stage: int) -> None:
    first, second = run_ranks(2, train_branches, stage)
    assert first[0] == second[0] == [True] * 4
    initial = {name: p.detach() for name, p in _initial().named_parameters()}
    assert all(not torch.equal(first[1][name], tensor) for name, tensor in initial.items()), "both branches trained"


class Chain(nn.Module):
    """More groups than slots in the ring of gradient buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor, without_bias: set[int], without: set[int]) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number not in without:
                x = nn.functional.linear(x, layer.weight, None if number in without_bias else layer.bias)
        return x.square().mean()


def train_chain(rank: int, world: int, stage: int) -> list[bool]:
    torch.manual_seed(0)
    engine = dtrain.initialize(Chain(), precision="fp32", zero_stage=stage, seed=0)
    odd = rank == 1
    applied = []
    for step in range(6):
        engine.backward(engine(torch.randn(4, 64), {2, 5} if odd else set(), {1, 3, 4} if odd and step % 2 else set()))
        applied.append(engine.step().applied)
    return applied


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_graphs_of_many_groups_may_differ_between_ranks(stage: int) -> None:
    """Gradients arrive in another order, so nothing may be sent where one arrives."""
    assert run_ranks(2, train_chain, stage) == [[True] * 6] * 2


def branch_at_stage_3(rank: int, world: int) -> str:
    try:
        train_branches(rank, world, 3)
    except (CommunicationError, DivergenceError) as error:
        return str(error)
    return ""


def test_at_stage_3_different_branches_end_the_run() -> None:
    """Every unshard is a collective, so all ranks must go through the same groups."""
    for message in run_ranks(2, branch_at_stage_3):
        assert "the ranks have diverged: rank 0 is at " in message
        assert "branches.0/float32" in message
        assert "branches.1/float32" in message


def _initial() -> Branches:
    torch.manual_seed(0)
    return Branches()
