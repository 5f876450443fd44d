"""``engine.full_model()``: on every engine, a copy with whole weights that one rank runs without the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dtrain
from dtrain.errors import UsageError
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

WIDTH = 16  # the least that FP8 takes
X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))
ENGINES = [("native", 0), ("native", 2), ("native", 3), ("ddp", 0), ("fsdp2", 2), ("fsdp2", 3), ("deepspeed", 3)]


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Net(nn.Module):
    """Units, tied and frozen weights, a norm, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)])
            self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.head, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.head.weight
        self.register_buffer("shift", torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(torch.tanh(self.head(self.frozen(x)))) + self.shift


def _step(engine: Any) -> None:
    for x in engine.accumulate([X]):
        engine.backward(engine(x).float().pow(2).mean())
    engine.step(lr=1e-2)


def _computes_alone(rank: int, world: int, precision: str) -> None:
    for name, stage in ENGINES:
        if (name, precision) == ("deepspeed", "fp8"):  # DeepSpeed refuses it
            continue
        engine = dtrain.initialize(Net(), engine=name, precision=precision, zero_stage=stage)
        _step(engine)
        with engine.eval():
            expected = engine(X)
        case = f"{name} stage {stage}"
        before = engine.memory()
        with engine.full_model() as model:
            assert not model.training, case
            assert model.last.weight is model.head.weight, case
            for _ in range(1 + 2 * rank):  # ranks that communicated here would wait for each other
                y = model(X)
                assert not y.requires_grad, case
            dtype = torch.float32 if precision == "fp32" or name == "ddp" else torch.bfloat16
            assert {p.dtype for p in model.blocks[0].parameters()} == {dtype}, case
            assert torch.equal(y.float(), expected), case
        after = engine.memory()  # caches, and weights that FSDP2 keeps between uses, may be gone
        assert all(after[kind] <= before[kind] for kind in before), case
        _step(engine)  # the copy leaves the engine as it was
        with engine.eval():
            assert not torch.equal(engine(X), expected), case


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_each_rank_runs_a_whole_copy_alone(precision: str) -> None:
    run_ranks(2, _computes_alone, precision)


def test_is_refused_between_backward_and_step() -> None:
    engine = dtrain.initialize(Net(), precision="fp32")
    for x in engine.accumulate([X]):
        engine.backward(engine(x).pow(2).mean())
    with pytest.raises(UsageError, match="between backward and step"), engine.full_model():
        pass
    engine.step(lr=1e-2)
    with engine.eval(), pytest.raises(UsageError, match=r"inside engine\.eval"), engine.full_model():
        pass
