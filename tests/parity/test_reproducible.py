"""P5: with ``reproducible=True`` the world size and the stage change no bit; without it they do."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from tests.helpers.fault_counts import FaultCounts
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, forward_backward, start

pytestmark = pytest.mark.processes

# Of a step: divisible by 1, 2, 3 and 4, and enough that FP32 sums of BF16 gradients round, which 12 do not.
NUM_MICRO_BATCHES = 24
STEPS = 4
BAD_STEP = 2  # skipped on all ranks: the loss of one micro-batch is infinite


def train_bits(rank: int, world: int, run: Run) -> tuple[dict[str, Tensor], list[tuple[bool, float]]]:
    engine = start(run)
    history = []
    for step in range(run.steps):
        bad = step == BAD_STEP and rank == world - 1
        forward_backward(engine, run, step, loss_factor=torch.inf if bad else 1.0)
        outcome = engine.step()
        history.append((outcome.applied, outcome.grad_norm if outcome.applied else 0.0))
    return engine.master_state(), history


def bits_run(world: int, stage: int, precision: str, *, reproducible: bool) -> Run:
    return Run(
        "transformer",  # with dropout
        steps=STEPS,
        accumulation=NUM_MICRO_BATCHES // world,
        unequal_weights=True,
        options={"precision": precision, "zero_stage": stage, "reproducible": reproducible},
    )


def train_stages(rank: int, world: int, precision: str, reproducible: bool) -> list[object]:
    return [train_bits(rank, world, bits_run(world, s, precision, reproducible=reproducible)) for s in range(4)]


@functools.cache
def stages(world: int, precision: str, reproducible: bool) -> list[tuple[dict[str, Tensor], list[tuple[bool, float]]]]:
    return run_ranks(world, train_stages, precision, reproducible)[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_equal_bits(faults: FaultCounts, world: int, precision: str) -> None:
    reference, reference_history = stages(1, precision, True)[0]
    assert [applied for applied, _ in reference_history] == [step != BAD_STEP for step in range(STEPS)]
    assert all(norm > 0.05 for applied, norm in reference_history if applied), "clipping must be active"
    for stage, (masters, history) in enumerate(stages(world, precision, True)):
        assert history == reference_history, f"world {world}, stage {stage}: norms differ"
        for name, tensor in reference.items():
            assert torch.equal(masters[name], tensor), f"world {world}, stage {stage}: '{name}' differs"
    faults.passed("F12", len(stages(world, precision, True)))


def test_the_plain_order_differs() -> None:
    """The control: ranks that first sum their own micro-batches diverge, so the test above can fail."""
    one_rank, three_ranks = stages(1, "bf16", False)[0][0], stages(3, "bf16", False)[0][0]
    assert any(not torch.equal(three_ranks[name], tensor) for name, tensor in one_rank.items())
