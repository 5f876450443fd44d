"""Reductions overlap backward, in one order on all ranks, whatever each rank's graph looks like."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtrain
from dtrain.distributed.transport import host_memory
from dtrain.distributed.transport.choose import make_communicator
from dtrain.errors import CommunicationError, DivergenceError
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, forward_backward, start

pytestmark = pytest.mark.processes


def trace(rank: int, world: int, stage: int) -> list[str]:
    """Gradients and collectives of one step, in the order in which they happened."""
    run = Run("transformer", options={"precision": "fp32", "zero_stage": stage})
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


class Chain(nn.Module):
    """More groups than slots in the ring of gradient buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor, without_bias: set[int], without: set[int]) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number not in without:
                x = nn.functional.linear(x, layer.weight) if number in without_bias else layer(x)
        return x.square().mean()


def train_chain(rank: int, world: int, stage: int, shared: bool) -> tuple[list[bool], dict[str, torch.Tensor]]:
    """Rank 1 uses other parameters than rank 0; returns which steps were applied, and the weights.

    Gradients arrive in another order on each rank, so nothing may be sent where one arrives.
    """
    torch.manual_seed(0)
    comm = make_communicator(dist.group.WORLD, torch.device("cpu"), shared_memory=shared)
    with mock.patch.object(host_memory, "MAX_BYTES_IN_FLIGHT", 1):
        engine: Any = dtrain.initialize(Chain(), precision="fp32", zero_stage=stage, seed=0, comm=comm)
    odd = rank == 1
    applied = []
    for step in range(4):
        for micro in engine.accumulate(range(2)):
            torch.manual_seed(100 * step + 10 * micro + rank)
            without = {1, 3, 4} if odd and step % 2 else set() if odd else {5}
            loss = engine(torch.randn(4, 64), {2} if odd and stage < 3 else set(), without)
            engine.backward(loss, weight=1.0 + micro)
        applied.append(engine.step().applied)
    return applied, engine.master_state()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_may_use_different_parameters(stage: int) -> None:
    """The bits are the same through shared memory, whose slots are reused many times, and through sockets."""
    initial = dict(Chain().named_parameters())
    in_memory, through_sockets = (run_ranks(2, train_chain, stage, shared) for shared in (True, False))
    assert [applied for applied, _ in in_memory + through_sockets] == [[True] * 4] * 4
    for name, master in through_sockets[0][1].items():
        assert torch.equal(in_memory[0][1][name], master), name
        assert not torch.equal(master, initial[name]), name


def diverge_at_stage_3(rank: int, world: int) -> str:
    with pytest.raises((CommunicationError, DivergenceError)) as caught:
        train_chain(rank, world, 3, True)
    return str(caught.value)


def test_at_stage_3_different_branches_end_the_run() -> None:
    """Every unshard is a collective, so all ranks must go through the same groups."""
    for message in run_ranks(2, diverge_at_stage_3):
        assert "the ranks have diverged: rank 0 is at " in message
        assert "layers." in message
