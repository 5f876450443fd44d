"""A slow rank is named, with the phase in which it is slow, by every engine that sees its waits there."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.distributed.progress import Phase
from dtrain.engine.step import StepEngine
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes
ENGINES = [("native", 0), ("native", 1), ("native", 2), ("native", 3), ("ddp", 0), ("fsdp2", 3)]
DELAY_S = 0.05
Found = dict[str, tuple[int, str | None] | None]


class _Slow(torch.autograd.Function):
    """Identity whose forward and backward sleep."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, delays: dict[Phase, float]) -> Tensor:
        ctx.delays = delays  # type: ignore[attr-defined]
        time.sleep(delays.get(Phase.FORWARD, 0.0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.delays.get(Phase.BACKWARD, 0.0))  # type: ignore[attr-defined]
        return grad, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.delays: dict[Phase, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return _Slow.apply(x, self.delays).square().mean()  # type: ignore[no-any-return]


def find_slow(rank: int, world: int, every: int) -> Found:
    found: Found = {}
    for name, stage in ENGINES:
        model = Model()
        engine = dtrain.initialize(
            model, optimizer=dtrain.AdamW(lr=1e-3), engine=name, zero_stage=stage, precision="fp32"
        )
        assert isinstance(engine, StepEngine)
        engine.busy.every = every
        for case in engine.timed_phases[:3]:  # the last one is the update, which no user code delays
            model.delays = {case: DELAY_S} if rank == 1 else {}
            for _ in range(2 * engine.busy.every):  # one window at least is of this case alone
                time.sleep(model.delays.get(Phase.DATA, 0.0))
                engine.backward(engine(torch.ones(2, 8)))
                engine.step()
            times = engine.busy.latest
            assert times is not None
            found[f"{name} {stage} {case.name}"] = (
                times.slowest_rank,
                None if times.phase is None else times.phase.name,
            )
    return found


def test_a_rank_delayed_by_50_ms_is_named_with_its_phase() -> None:
    for found in run_ranks(2, find_slow, 2):
        assert found.keys() >= {"native 3 BACKWARD", "ddp 0 FORWARD", "fsdp2 3 DATA"}
        for key, value in found.items():
            assert value == (1, key.split()[-1]), key
