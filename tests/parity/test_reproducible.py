"""P5: with ``reproducible=True`` the world size and the stage change no bit; without it they do."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.fault_counts import FaultCounts
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, forward_backward, start

pytestmark = pytest.mark.processes

# Of a step: divisible by 1, 2, 3 and 4, and enough that FP32 sums of BF16 gradients round, which 12 do not.
NUM_MICRO_BATCHES = 24
STEPS = 3
BAD_STEP = 1  # skipped on all ranks: the loss of one micro-batch is infinite


def train_bits(rank: int, world: int, precision: str, stage: int, reproducible: bool) -> tuple[Any, list[Any]]:
    run = Run(
        "transformer",  # with dropout
        accumulation=NUM_MICRO_BATCHES // world,
        unequal_weights=True,
        options={"precision": precision, "zero_stage": stage, "reproducible": reproducible},
    )
    engine = start(run)
    history = []
    for step in range(STEPS):
        bad = step == BAD_STEP and rank == world - 1
        forward_backward(engine, run, step, loss_factor=torch.inf if bad else 1.0)
        outcome = engine.step()
        history.append((outcome.applied, outcome.grad_norm if outcome.applied else 0.0))
    return engine.master_state(), history


def train_stages(rank: int, world: int, precision: str, stages: tuple[int, ...]) -> list[Any]:
    return [train_bits(rank, world, precision, stage, True) for stage in stages]


@functools.cache
def of_one_rank(precision: str, reproducible: bool = True) -> tuple[dict[str, Tensor], list[Any]]:
    found: tuple[dict[str, Tensor], list[Any]] = run_ranks(1, train_bits, precision, 0, reproducible)[0]
    return found


@pytest.mark.parametrize(
    ("precision", "world", "stages"),
    [
        ("fp32", 2, (1, 3)),
        ("bf16", 3, (2,)),
        *(pytest.param("bf16", world, (0, 1, 2, 3), marks=pytest.mark.exhaustive) for world in (1, 2, 3, 4)),
    ],
)
def test_equal_bits(faults: FaultCounts, precision: str, world: int, stages: tuple[int, ...]) -> None:
    reference, reference_history = of_one_rank(precision)
    assert [applied for applied, _ in reference_history] == [step != BAD_STEP for step in range(STEPS)]
    assert all(norm > 0.05 for applied, norm in reference_history if applied), "clipping must be active"
    for stage, (masters, history) in zip(stages, run_ranks(world, train_stages, precision, stages)[0], strict=True):
        assert history == reference_history, f"world {world}, stage {stage}: norms differ"
        for name, tensor in reference.items():
            assert torch.equal(masters[name], tensor), f"world {world}, stage {stage}: '{name}' differs"
    faults.passed("F12", len(stages))


def test_the_plain_order_differs() -> None:
    """The control: ranks that first sum their own micro-batches diverge, so the test above can fail."""
    one_rank, three_ranks = of_one_rank("bf16", False)[0], run_ranks(3, train_bits, "bf16", 0, False)[0][0]
    assert any(not torch.equal(three_ranks[name], tensor) for name, tensor in one_rank.items())
