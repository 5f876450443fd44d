"""A calibrated loss scale: each gradient of every rank is measured, and all ranks choose the same.

Of every engine but DeepSpeed, which refuses FP16 on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.config.precision import LossScale
from dtrain.distributed.logging import logger
from dtrain.engine.step import StepEngine
from dtrain.precision.loss_scale import LossScaleState
from tests.engines.helpers import state_digests
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

ENGINES = [("native", 0), ("native", 1), ("native", 2), ("native", 3), ("ddp", 0), ("fsdp2", 2)]


class Sum(nn.Module):
    """Its gradients are what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 1, bias=False)
        self.second = nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(0.5 * x)


def build(engine: str, stage: int) -> StepEngine:
    torch.manual_seed(0)
    scale = LossScale("calibrated", init=1024.0, calibration_steps=3)
    built = dtrain.initialize(Sum(), engine=engine, zero_stage=stage, precision="fp16", loss_scale=scale, seed=0)
    assert isinstance(built, StepEngine)
    return built


def largest_of(rank: int, step: int, micro_batch: int) -> float:
    """Only once, on one rank, in one micro-batch, is a gradient as large as 0.75."""
    return 0.75 if (rank, step, micro_batch) == (1, 1, 0) else 0.125 * (1 + step % 2)


def take_step(engine: StepEngine, step: int) -> float:
    """Returns the loss scale of the step."""
    numbers = [0, 1]
    for number in engine.accumulate(numbers):
        x = torch.full((1, 4), -0.01)
        x[0, number] = -largest_of(engine.rank, step, number)
        # neither a weight nor the sum of the two is part of what is measured
        engine.backward(engine(x).mean(), weight=16.0)
    return engine.step().loss_scale


def train(rank: int, world: int) -> dict[tuple[str, int], tuple[list[float], LossScaleState, str]]:
    found = {}
    for name, stage in ENGINES:
        engine = build(name, stage)
        with mock.patch.object(logger, "info") as info:
            scales = [take_step(engine, step) for step in range(5)]
        lines = [call.args[0] % call.args[1:] for call in info.call_args_list]
        (line,) = (line for line in lines if "FP16 flushes" in line)
        found[name, stage] = scales, engine.loss_scale, line
    return found


def test_all_ranks_choose_from_the_largest_gradient_of_all() -> None:
    for found in run_ranks(2, train):
        for engine, (scales, state, line) in found.items():
            assert state.max_abs_grad == 0.75, engine
            # 65,504 / (8 x 0.75) = 10,917
            assert scales == [1024.0, 1024.0, 1024.0, 8192.0, 8192.0], engine
            assert line == (
                "loss scale calibrated to 8192: largest gradient 7.5e-01 x 8192 x margin 8 = 4.92e+04 <= 65,504; of "
                "the measured gradients FP16 flushes 0.00% to zero at scale 1, 0.00% at 8192"
            ), engine


def interrupt(rank: int, world: int, folder: str, save_after: int) -> tuple[dict[str, str], LossScaleState]:
    """Goes on in a new engine with what the first has saved."""
    engine = build("native", 2)
    for step in range(5):
        if step == save_after:
            engine.save(folder)
            engine = build("native", 2)
            engine.load(folder)
        take_step(engine, step)
    return state_digests(engine), engine.loss_scale


def test_a_run_that_is_resumed_has_the_same_bits(tmp_path: Path) -> None:
    whole, amid, after = (run_ranks(2, interrupt, str(tmp_path / str(step)), step) for step in (-1, 2, 4))
    assert whole[0][1].scale == 8192.0
    assert amid == after == whole
